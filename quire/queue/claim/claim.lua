-- CLAIM: give a worker the right to run a queued request, or say why not.
--
-- KEYS  those of running.lua with one request
-- ARGV  id, owner (fresh, so that a repeated call is recognised), fingerprint or '', and what
--       affinity.lua takes
-- Returns {'claimed', epoch, body, attempts, submitted, fingerprint before, cancel, log entries,
-- tokens on trial, arrival, moment by which it is ranked, deadline or 0, end of the target latency or
-- 0, limit of an answer without `max_tokens` or ''} or {reason, 1 when this call ended the request,
-- for `kept` the ms left}. A claim consumes a ticket of the request's class, whichever, and
-- a few more if there are too many. It needs none: RESTORE adds those that are missing. A request
-- that cannot be claimed leaves the rank sets, unless it is kept or the queue is paused.

local id, owner, fingerprint = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local keys, now = take_keys(id), now_ms()

-- The most tickets that one claim consumes: a limit on its time.
local MAX_TICKETS = 5

local function refuse(reason, ended)
  unrank(id)
  return { reason, ended }
end

-- The reason given for each state that cannot be claimed; for any other it is `finished`.
local SAID_OF = {
  running = 'running', scheduled = 'scheduled', cancelled = 'cancelled', expired = 'expired',
}

-- The first write of a claim. It is refused to users who may not work on the queue, and by a server
-- without memory, and otherwise has an effect only where the group is missing.
local group = redis.pcall('XGROUP', 'CREATE', ingress_of(0), 'workers', '0')
local failed = group.err and tostring(group.err)
if failed and not string.find(failed, 'BUSYGROUP', 1, true)
  and not string.find(failed, 'requires the key to exist', 1, true) then
  return group
end

local record = record_of(keys)

local function answer(epoch, attempts)
  return { 'claimed', epoch, redis.call('GET', keys.body), attempts, record.submitted_ms,
    record.fingerprint or '', record.cancel == '1' and 1 or 0,
    redis.call('XRANGE', keys.output, '-', '+'),
    trial_of(tonumber(attempts), tonumber(record.losses or '0')), arrival_of(record),
    moment_of_record(record), record.deadline_ms,
    record.due_ms or '0', record.answer_limit or '' }
end

if record.state == 'running' and record.owner == owner then
  -- The reply to this very call was lost.
  return answer(record.epoch, record.attempts)
elseif record.state and record.state ~= 'queued' then
  return refuse(SAID_OF[record.state] or 'finished', 0)
elseif not record.state then
  forget(keys, id)
  return refuse('missing', 0)
end

local newest = agree(keys, record)
if newest.done then
  local state = settle_again(keys, id, record, record.epoch, newest, now)
  return refuse(SAID_OF[state] or 'finished', 0)
end

-- Evicted, or deleted by hand: see CONDEMN, which finds the keys sound if the log has its end.
assert(redis.call('EXISTS', keys.body) == 1, 'the message is gone')

local reason = ending_due(record, tonumber(record.attempts), now)
if not reason and now >= tonumber(redis.call('ZSCORE', WAIT, id) or 'inf') then
  reason = 'queue_timeout'
end
if reason then
  local state = end_for(reason, keys, id, record, now)
  return refuse(state == 'failed' and 'attempts_spent' or state, 1)
end

local turn = turn_of(id)
if is_parked(id, turn) then
  return refuse('earlier_turn', 0)
end

if redis.call('HEXISTS', CONTROL, 'paused') == 1 then
  -- The candidate was found just before the pause.
  return { 'paused', 0 }
end

local served, workers = KEYS[next_key], KEYS[next_key + 1]
local worker, affinity = ARGV[FIRST + 3] or '', tonumber(ARGV[FIRST + 4] or '0')
local knows_workers = turn and served and worker ~= ''
if knows_workers then
  local kept = kept_for(keys, turn, record, served, workers, worker, affinity, now)
  if kept > 0 then
    return { 'kept', 0, int(kept) }
  end
  set_server(served, turn.session, worker)
end

local epoch, attempts = int(tonumber(record.epoch) + 1), int(tonumber(record.attempts) + 1)
redis.call('HSET', keys.record, 'epoch', epoch, 'owner', owner, 'attempts', attempts,
  'resumed_from', record.published, 'worker', worker)
enter(keys, id, 'running')
pass_time(record.priority, record.fair)
if tonumber(record.published) > 0 then
  redis.call('HINCRBY', keys.record, 'resumes', 1)
end
if not record.claimed_ms then
  redis.call('HSET', keys.record, 'claimed_ms', int(now))
end
if not record.fingerprint and fingerprint ~= '' then
  redis.call('HSET', keys.record, 'fingerprint', fingerprint)
end
redis.call('ZADD', LEASE, int(now + LEASE_MS), id)
keep(keys, keys.record)
take_surplus(record.priority, MAX_TICKETS)
return answer(epoch, attempts)
