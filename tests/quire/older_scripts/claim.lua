-- CLAIM: turn one delivered ingress entry into the right to run its request, or say why not.
--
-- KEYS  those of running.lua with one request, then the stream of the entry
-- ARGV  id, entry id, owner (fresh, so that a repeated call is recognised), fingerprint or ''
-- Returns {'claimed', epoch, body, attempts, submitted, fingerprint before, cancel, log entries,
-- tokens on trial} or {reason, 1 when this call ended the request}. The entry is acknowledged and
-- deleted in any case: it was delivered, so deleting it leaves the group's lag known.

local id, entry_id, owner = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local fingerprint = ARGV[FIRST + 3]
local keys, now = take_keys(id), now_ms()
local stream = KEYS[next_key]

local function drop_entry()
  redis.call('XACK', stream, 'workers', entry_id)
  return redis.call('XDEL', stream, entry_id)
end

local function refuse(reason, ended)
  drop_entry()
  return { reason, ended }
end

-- The reason given for each state that cannot be claimed; for any other it is `finished`.
local SAID_OF = {
  running = 'running', scheduled = 'scheduled', cancelled = 'cancelled', expired = 'expired',
}

local record = fields_of(keys, 'state', 'epoch', 'owner', 'attempts', 'resumes', 'published',
  'cancel', 'deadline_ms', 'submitted_ms', 'claimed_ms', 'fingerprint', 'prefix', 'losses', 'priority')

local function answer(epoch, attempts)
  return { 'claimed', epoch, redis.call('GET', keys.body), attempts, record.submitted_ms,
    record.fingerprint or '', record.cancel == '1' and 1 or 0,
    redis.call('XRANGE', keys.output, '-', '+'),
    trial_of(tonumber(attempts), tonumber(record.losses or '0')) }
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
  local state = settle(keys, id, record.epoch, newest.state, now)
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

if redis.call('HEXISTS', CONTROL, 'paused') == 1 then
  -- Delivered just before the pause. Back into the stream, once however often this is called.
  if drop_entry() == 1 then
    add_entry(keys, id, record.epoch, stream, stream == resumed_of(record.priority))
  end
  return { 'paused', 0 }
end

local epoch, attempts = int(tonumber(record.epoch) + 1), int(tonumber(record.attempts) + 1)
redis.call('HSET', keys.record, 'epoch', epoch, 'owner', owner, 'attempts', attempts,
  'resumed_from', record.published)
enter(keys, id, 'running')
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
drop_entry()
return answer(epoch, attempts)
