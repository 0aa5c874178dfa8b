-- FAIL: an attempt went wrong. Try again after a pause that grows, or end the request.
--
-- KEYS  those of running.lua with one request
-- ARGV  id, epoch, owner, 1 when it may be tried again, reason, terminal record, first pause,
--       longest pause, jitter from 0 to 1000
-- Returns the state after this when this claim failed, now or in an earlier call; '' when it is
-- fenced. The jitter is drawn by the caller: scripts have no source of randomness.

local id, epoch, owner = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local retryable, reason, done = ARGV[FIRST + 3] == '1', ARGV[FIRST + 4], ARGV[FIRST + 5]
local first, longest = tonumber(ARGV[FIRST + 6]), tonumber(ARGV[FIRST + 7])
local jitter = tonumber(ARGV[FIRST + 8]) / 1000
local keys, now = take_keys(id), now_ms()

local record = record_of(keys)

local function fail_for_good()
  redis.call('ZREM', LEASE, id)
  return write_end(keys, id, epoch, 'failed', done, now)
end

-- Half of the pause is fixed, the other half random. A deadline ends it sooner.
local function schedule(attempts)
  local pause = math.min(longest, first * 2 ^ math.max(0, attempts - 1))
  local due, deadline = now + math.floor(pause * (1 + jitter) / 2), tonumber(record.deadline_ms)
  if deadline > 0 then
    due = math.min(due, deadline)
  end
  redis.call('HSET', keys.record, 'owner', '', 'epoch', int(tonumber(record.epoch) + 1),
    'attempts', int(attempts))
  redis.call('ZREM', LEASE, id)
  redis.call('ZADD', DELAY, int(due), id)
  enter(keys, id, 'scheduled')
  wait_from(id, due, tonumber(record.deadline_ms))
  live_for(keys, due - now + SPAN_MS)
  return 'scheduled'
end

if not holds(record, epoch, owner) then
  local mine = record.released == owner or (record.epoch == epoch and record.owner == owner)
  return mine and record.state or ''
elseif not retryable then
  return fail_for_good()
end
agree(keys, record)
local attempts = attempts_of(record)
local ending = ending_due(record, attempts, now)
if ending == 'attempts_spent' then
  bury(keys, id, reason, now)
  return fail_for_good()
end
redis.call('HSET', keys.record, 'released', owner)
if ending then
  return end_for(ending, keys, id, record, now)
end
return schedule(attempts)
