-- What the transitions of workers and operators share: the lease, the fence, the way back.
--
-- KEYS  9 lease, 10 dead, and those of request.lua

local LEASE, DEAD = KEYS[9], KEYS[10]
next_key = 11

-- The most dead letters that are kept; the oldest go first.
local MAX_DEAD_LETTERS = '10000'

-- Whether (epoch, owner) still has the exclusive right to this request. THE fence: epoch and owner
-- both, because after Redis lost its tail two claims may have been given the same epoch.
local function holds(fields, epoch, owner)
  return fields.state == 'running' and fields.epoch == epoch and fields.owner == owner
end

-- Renews the life of a running request's keys once half of it is gone. `witness` is the key to look
-- at; one without any expiry, just created, counts as due.
local function keep(keys, witness)
  if redis.call('PTTL', witness) < SPAN_MS / 2 then
    live_for(keys, SPAN_MS)
  end
end

-- Keeps what was given up for a person to look at, with all that REQUEUE needs once the record is
-- gone. Before the end, which deletes the body.
local function bury(keys, id, reason)
  local record = fields_of(keys, 'attempts', 'priority', 'tenant', 'deadline_ms', 'metadata')
  redis.call('XADD', DEAD, 'MAXLEN', '~', MAX_DEAD_LETTERS, '*', 'id', id, 'reason', reason,
    'attempts', record.attempts, 'priority', record.priority, 'tenant', record.tenant,
    'deadline_ms', record.deadline_ms, 'metadata', record.metadata or '',
    'tokens', booked(id).tokens, 'bytes', redis.call('GET', keys.body) or '')
end

-- The end that is due before another attempt may begin, or nil. `attempts` are those already made.
local function ending_due(record, attempts, now)
  local deadline = tonumber(record.deadline_ms)
  if record.cancel == '1' then
    return 'cancelled'
  elseif deadline > 0 and now >= deadline then
    return 'deadline'
  elseif attempts >= MAX_ATTEMPTS then
    return 'attempts_spent'
  end
  return nil
end

-- Ends the request for the given reason; spent attempts leave a dead letter.
local function end_for(reason, keys, id, record, now)
  if reason == 'attempts_spent' then
    bury(keys, id, reason)
  end
  redis.call('ZREM', LEASE, id)
  return end_without_worker(keys, id, record.epoch, ENDINGS[reason], now)
end

-- Puts a request at the end of its queue.
local function enqueue(keys, id, priority, now)
  redis.call('HSET', keys.record, 'queue_until_ms', int(now + MAX_QUEUE_MS))
  enter(keys, id, 'queued')
  live_for(keys, SPAN_MS)
  redis.call('XADD', ingress_of(priority), '*', 'id', id)
  return 'queued'
end

-- Takes a running request from its worker: back to the end of its queue, or to its end when one is
-- due. `attempts` is the number that shall count from now on. Returns the state.
local function put_back(keys, id, record, attempts, now)
  local reason = ending_due(record, attempts, now)
  if reason then
    return end_for(reason, keys, id, record, now)
  end
  redis.call('HSET', keys.record, 'owner', '', 'attempts', int(attempts),
    'epoch', int(tonumber(record.epoch) + 1))
  redis.call('ZREM', LEASE, id)
  return enqueue(keys, id, record.priority, now)
end
