-- Shared by CLAIM alone: the worker that served the last turn of a session has its prefix.
--
-- KEYS  after those of the request: served, workers; a caller may leave them out
-- ARGV  after the fingerprint: worker or '', how many ms a turn waits for the last worker

-- `served` is a hash of so many fields at most, one for all sessions with the same number. A later
-- session replaces an earlier one there, which costs a turn of that one its cache.
local NUM_SLOTS = 65536
local SERVED_MS = 86400000

-- The states of a worker that claims nothing any more.
local LEAVING = { draining = true, stopped = true, failed = true }

local function slot_of(session)
  local slot = 0
  for index = 1, #session do
    slot = (slot * 31 + string.byte(session, index)) % NUM_SLOTS
  end
  return int(slot)
end

local function set_server(served, session, worker)
  redis.call('HSET', served, slot_of(session), session .. ' ' .. worker)
  redis.call('PEXPIRE', served, int(SERVED_MS))
end

-- The worker of the last turn of a session; nil if it is not known.
local function server_of(served, session)
  local entry = redis.call('HGET', served, slot_of(session))
  local found, worker = string.match(entry or '', '^(%S+) (.+)$')
  return found == session and worker or nil
end

-- Whether a worker may claim: it was seen within a lease, and was not asked to drain.
local function is_there(workers, worker, now)
  local seen, state = string.match(redis.call('HGET', workers, worker) or '', '^(%d+) (%S+)')
  return seen and not LEAVING[state] and now - tonumber(seen) <= LEASE_MS
    and redis.call('HEXISTS', CONTROL, 'drain:' .. worker) == 0
end

-- For how many ms a turn is still kept for the worker of the last one; 0 if `worker` may have it.
-- The time begins when another worker would have claimed it, so that it counts in a long queue too.
-- A turn that was claimed before is kept for nobody: its worker has died, or gave it back.
local function kept_for(keys, turn, record, served, workers, worker, affinity, now)
  local last = not record.claimed_ms and affinity > 0 and server_of(served, turn.session)
  if not last or last == worker or not is_there(workers, last, now) then
    return 0
  end
  if not record.kept_ms then
    redis.call('HSET', keys.record, 'kept_ms', int(now))
  end
  return math.max(0, tonumber(record.kept_ms or now) + affinity - now)
end
