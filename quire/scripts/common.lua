-- What every transition shares; put before the text of each.
--
-- The first nine arguments are the broker's settings, the transition's own follow them. Messages
-- (bodies, tokens, ends) are opaque strings here. All numbers are milliseconds of Redis' own clock
-- except a request's deadline, which its producer computed from that clock.

local LEASE_MS = tonumber(ARGV[1])
local MAX_QUEUE_MS = tonumber(ARGV[2])
local RETENTION_MS = tonumber(ARGV[3])
local MAX_ATTEMPTS = tonumber(ARGV[4])
local MAX_BACKLOG = tonumber(ARGV[5]) -- 0 for no limit
local FIRST = 10 -- the index of the transition's own first argument

-- How long the keys of a request live without a sign of life from it.
local SPAN_MS = MAX_QUEUE_MS + RETENTION_MS
-- The most dead letters that are kept; the oldest go first.
local MAX_DEAD_LETTERS = '10000'

-- The ends a request can come to while no worker runs it.
local ENDINGS = {
  cancelled = { state = 'cancelled', done = ARGV[6] },
  deadline = { state = 'expired', done = ARGV[7] },
  queue_timeout = { state = 'expired', done = ARGV[8] },
  attempts_spent = { state = 'failed', done = ARGV[9] },
}

-- Lua writes large numbers with an exponent; Redis must never see one.
local function int(number)
  return string.format('%.0f', number)
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- The three keys of the request whose record is KEYS[index].
local function keys_at(index)
  return { record = KEYS[index], body = KEYS[index + 1], output = KEYS[index + 2] }
end

-- The wanted fields of a record by name; a missing field is false.
local function fields_of(keys, ...)
  local values = redis.call('HMGET', keys.record, ...)
  local fields = {}
  for index, name in ipairs({ ... }) do
    fields[name] = values[index]
  end
  return fields
end

-- Whether (epoch, owner) still has the exclusive right to this request. THE fence: epoch and owner
-- both, because after Redis lost its tail two claims may have been given the same epoch.
local function holds(fields, epoch, owner)
  return fields.state == 'running' and fields.epoch == epoch and fields.owner == owner
end

-- Sets the life of all keys of a request.
local function live_for(keys, milliseconds)
  redis.call('PEXPIRE', keys.record, int(milliseconds))
  redis.call('PEXPIRE', keys.body, int(milliseconds))
  redis.call('PEXPIRE', keys.output, int(milliseconds))
end

-- Renews the life of a running request's keys once half of it is gone. `witness` is the key to look
-- at; one without any expiry, just created, counts as due.
local function keep(keys, witness)
  if redis.call('PTTL', witness) < SPAN_MS / 2 then
    live_for(keys, SPAN_MS)
  end
end

-- Writes the terminal entry, with what only the broker saw stamped beside the author's message.
local function write_end(keys, id, lease, epoch, state, done, now)
  local record = fields_of(keys, 'published', 'attempts', 'resumes', 'submitted_ms', 'claimed_ms',
    'first_token_ms', 'metadata')
  local entry = { 'done', done, 'attempts', record.attempts, 'resumes', record.resumes,
    'submitted_ms', record.submitted_ms, 'finished_ms', int(now) }
  for _, name in ipairs({ 'claimed_ms', 'first_token_ms', 'metadata' }) do
    if record[name] then
      entry[#entry + 1] = name
      entry[#entry + 1] = record[name]
    end
  end
  redis.call('XADD', keys.output, record.published .. '-' .. epoch, unpack(entry))
  redis.call('HSET', keys.record, 'state', state, 'epoch', epoch, 'finished_ms', int(now))
  redis.call('HDEL', keys.record, 'metadata')
  redis.call('ZREM', lease, id)
  redis.call('DEL', keys.body)
  live_for(keys, RETENTION_MS)
end

-- Ends a request without a worker. A new epoch and no owner: whoever still runs it is fenced, and
-- the entry gets an id above all others even if the request was never claimed.
local function end_without_worker(keys, id, lease, epoch, ending, now)
  redis.call('HSET', keys.record, 'owner', '')
  write_end(keys, id, lease, int(tonumber(epoch) + 1), ending.state, ending.done, now)
  return ending.state
end

-- Keeps what was given up for a person to look at. Before the end, which deletes the body.
local function bury(dead, keys, id, reason, attempts)
  redis.call('XADD', dead, 'MAXLEN', '~', MAX_DEAD_LETTERS, '*', 'id', id, 'reason', reason,
    'attempts', attempts, 'bytes', redis.call('GET', keys.body) or '')
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
local function end_for(reason, keys, id, lease, dead, record, now)
  if reason == 'attempts_spent' then
    bury(dead, keys, id, reason, record.attempts)
  end
  return end_without_worker(keys, id, lease, record.epoch, ENDINGS[reason], now)
end

-- Takes a running request from its worker: back to the end of its queue, or to its end when one is
-- due. `attempts` is the number that shall count from now on. Returns the state.
local function requeue(keys, id, lease, dead, first_ingress, record, attempts, now)
  local reason = ending_due(record, attempts, now)
  if reason then
    return end_for(reason, keys, id, lease, dead, record, now)
  end
  redis.call('HSET', keys.record, 'state', 'queued', 'owner', '', 'attempts', int(attempts),
    'epoch', int(tonumber(record.epoch) + 1), 'queue_until_ms', int(now + MAX_QUEUE_MS))
  redis.call('ZREM', lease, id)
  live_for(keys, SPAN_MS)
  redis.call('XADD', KEYS[first_ingress + tonumber(record.priority)], '*', 'id', id)
  return 'queued'
end
