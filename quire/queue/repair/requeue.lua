-- REQUEUE: queue the request of a dead letter again, under the same id.
--
-- KEYS  those of running.lua with one request, then those of the pictures that it names
-- ARGV  id, entry id of the dead letter, 1 to keep the tokens that are published, number of pictures
-- Returns the state after this, '' when there is neither letter nor request, `superseded` when a
-- later request has the id, `lacks` when a picture has expired. The record may be gone by now: everything needed is in the letter.

local id, letter_id, keeps_tokens = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2] == '1'
local keys, now = take_keys(id), now_ms()
local record = record_of(keys)
local pictures = { unpack(KEYS, #KEYS - tonumber(ARGV[FIRST + 3] or '0') + 1) }
local found = redis.call('XRANGE', DEAD, letter_id, letter_id)[1]
local letter = found and table_of(found[2])

if not letter or letter.id ~= id then
  -- Done already.
  return record.state or ''
elseif record.state and letter.submitted_ms ~= record.submitted_ms then
  -- The request of the letter is gone. Whoever reads the one that is there asked something else.
  return 'superseded'
elseif record.state and record.state ~= 'failed' then
  -- A torn file has a part of an earlier call.
  return record.state
end
for _, key in ipairs(pictures) do
  if redis.call('PTTL', key) == -2 then
    return 'lacks'
  end
end

-- This write comes first, so that a user without the right to it changes nothing.
redis.call('SET', keys.body, letter.bytes)
if record.state and keeps_tokens then
  -- The end is taken back. What is published after it has a higher epoch, and so a higher id.
  local last = redis.call('XREVRANGE', keys.output, '+', '-', 'COUNT', 1)[1]
  if last and table_of(last[2]).done then
    redis.call('XDEL', keys.output, last[1])
  end
else
  redis.call('DEL', keys.output)
  redis.call('HDEL', keys.record, unpack(TOKEN_FIELDS))
  redis.call('HSET', keys.record, 'published', '0', 'resumes', '0')
end
redis.call('HDEL', keys.record, unpack(DELETED_FIELDS))
redis.call('HSET', keys.record, 'owner', '', 'attempts', '0',
  'submitted_ms', letter.submitted_ms or int(now), 'epoch', int(tonumber(record.epoch or '0') + 1),
  'priority', letter.priority, 'tenant', letter.tenant, 'deadline_ms', letter.deadline_ms)
if letter.metadata ~= '' then
  redis.call('HSET', keys.record, 'metadata', letter.metadata)
end
if not record.state then
  redis.call('HSET', keys.record, 'asked', letter.asked)
end
if (letter.answer_limit or '') ~= '' then
  redis.call('HSET', keys.record, 'answer_limit', letter.answer_limit)
end
book(keys, id, 'failed', 'queued', tonumber(letter.tokens), letter.tenant)
record = record_of(keys)
if (letter.session or '') ~= '' then
  -- The request is the last turn of its session now: later ones may run already.
  record.session, record.number = letter.session, new_arrival()
  join_session(keys, id, record, record.number)
end
for _, key in ipairs(pictures) do
  live_on(key, SPAN_MS)
end
local state = enqueue(keys, id, record, keeps_arrival(record), now)
redis.call('XDEL', DEAD, letter_id)
-- This write comes last: of a torn file, which holds a part of all this, the letter is still known
-- as that of its request.
redis.call('HSET', keys.record, 'submitted_ms', int(now))
return state
