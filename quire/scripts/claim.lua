-- CLAIM: turn one delivered ingress entry into the right to run its request, or say why not.
--
-- KEYS  1 record, 2 body, 3 output, 4 lease, 5 dead, 6 the ingress stream of the entry
-- ARGV  id, entry id, owner (fresh, so that a repeated call is recognised), fingerprint or ''
-- Returns {'claimed', epoch, body, attempts, submitted, fingerprint before, cancel, log entries} or
-- {reason, 1 when this call ended the request}. The entry is acknowledged and deleted in any case:
-- it was delivered, so deleting it leaves the group's lag known.

local id, entry_id, owner = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local fingerprint = ARGV[FIRST + 3]
local keys, lease, dead, stream = keys_at(1), KEYS[4], KEYS[5], KEYS[6]
local now = now_ms()

local function drop_entry()
  redis.call('XACK', stream, 'workers', entry_id)
  redis.call('XDEL', stream, entry_id)
end

local function refuse(reason, ended)
  drop_entry()
  return { reason, ended }
end

local record = fields_of(keys, 'state', 'epoch', 'owner', 'attempts', 'resumes', 'published',
  'cancel', 'deadline_ms', 'queue_until_ms', 'submitted_ms', 'claimed_ms', 'fingerprint')

local function answer(epoch, attempts)
  return { 'claimed', epoch, redis.call('GET', keys.body), attempts, record.submitted_ms,
    record.fingerprint or '', record.cancel == '1' and 1 or 0,
    redis.call('XRANGE', keys.output, '-', '+') }
end

if record.state == 'running' and record.owner == owner then
  -- The reply to this very call was lost.
  return answer(record.epoch, record.attempts)
elseif record.state == 'running' then
  return refuse('running', 0)
elseif record.state == 'cancelled' or record.state == 'expired' then
  return refuse(record.state, 0)
elseif record.state and record.state ~= 'queued' then
  return refuse('finished', 0)
elseif not record.state or redis.call('EXISTS', keys.body) == 0 then
  return refuse('missing', 0)
end

local reason = ending_due(record, tonumber(record.attempts), now)
if not reason and now >= tonumber(record.queue_until_ms) then
  reason = 'queue_timeout'
end
if reason then
  local state = end_for(reason, keys, id, lease, dead, record, now)
  return refuse(state == 'failed' and 'attempts_spent' or state, 1)
end

local epoch, attempts = int(tonumber(record.epoch) + 1), int(tonumber(record.attempts) + 1)
redis.call('HSET', keys.record, 'state', 'running', 'epoch', epoch, 'owner', owner,
  'attempts', attempts)
if tonumber(record.published) > 0 then
  redis.call('HINCRBY', keys.record, 'resumes', 1)
end
if not record.claimed_ms then
  redis.call('HSET', keys.record, 'claimed_ms', int(now))
end
if not record.fingerprint and fingerprint ~= '' then
  redis.call('HSET', keys.record, 'fingerprint', fingerprint)
end
redis.call('ZADD', lease, int(now + LEASE_MS), id)
keep(keys, keys.record)
drop_entry()
return answer(epoch, attempts)
