-- Shared by the transitions of workers and operators: the lease, the fence, queueing again.
--
-- KEYS  those of request.lua, 24 lease, 25 dead

local LEASE, DEAD = KEYS[24], KEYS[25]
next_key = 26

-- A dead letter is kept until it is a week old, or until this many letters, or this many bytes of
-- requests, have been written after it.
local DEAD_LETTER_MS = 7 * 86400000
local MAX_DEAD_LETTERS = 10000
local MAX_DEAD_BYTES = 64 * 1024 * 1024

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

-- The letter at one end of the dead stream: its id, and its fields; nil when there is none.
local function letter_at(command, from, to)
  local found = redis.call(command, DEAD, from, to, 'COUNT', 1)[1]
  if found then
    return found[1], table_of(found[2])
  end
  return nil
end

-- Takes the oldest letters out until the rest is within its bounds. `total` are the bytes of all
-- letters written so far; each letter has the total of when it was written, so that the bytes of
-- those that are left need not be added up.
local function trim_letters(total, now)
  redis.call('XTRIM', DEAD, 'MINID', int(now - DEAD_LETTER_MS))
  redis.call('XTRIM', DEAD, 'MAXLEN', MAX_DEAD_LETTERS)
  local oldest, letter = letter_at('XRANGE', '-', '+')
  while oldest and total - (tonumber(letter.total) or 0) >= MAX_DEAD_BYTES do
    redis.call('XDEL', DEAD, oldest)
    oldest, letter = letter_at('XRANGE', '-', '+')
  end
  redis.call('PEXPIRE', DEAD, int(DEAD_LETTER_MS))
end

-- Writes a dead letter for a person to look at, with all that REQUEUE needs once the record is
-- gone, and the time by which it knows a later request of the same id. Call it before the end is
-- written, which deletes the body.
local function bury(keys, id, reason, now)
  local record = record_of(keys, 'metadata')
  local body = redis.call('GET', keys.body) or ''
  local _, last = letter_at('XREVRANGE', '+', '-')
  local total = (tonumber(last and last.total) or 0) + #body
  local letter = { 'id', id, 'reason', reason, 'tokens', booked(id).tokens, 'total', int(total),
    'bytes', body }
  for _, name in ipairs(LETTER_FIELDS) do
    letter[#letter + 1] = name
    letter[#letter + 1] = record[name] or ''
  end
  redis.call('XADD', DEAD, '*', unpack(letter))
  trim_letters(total, now)
end

-- The attempts that count once a claim is over. A claim that published tokens does not count: it
-- made progress, and the number of a request's tokens is bounded. Only claims without progress need
-- a bound.
local function attempts_of(record)
  local attempts = tonumber(record.attempts)
  if tonumber(record.published) > tonumber(record.resumed_from) then
    return attempts - 1
  end
  return attempts
end

-- A claim that published this many tokens before its worker was lost has acquitted its request.
local ACQUITTED = 64
-- One loss says little: machines die, and with them all that they run. So many in a row, without as
-- many tokens in between, make a suspect of a request that gets on, too.
local SUSPICIOUS = 2

-- How many claims in a row were lost with their workers, once another one is.
local function losses_of(record)
  if tonumber(record.published) - tonumber(record.resumed_from) >= ACQUITTED then
    return 0
  end
  return tonumber(record.losses or '0') + 1
end

-- How many tokens a request that is claimed may have to publish before others begin beside it: it
-- may be what its workers died of.
local function trial_of(attempts, losses)
  if losses >= SUSPICIOUS then
    return ACQUITTED
  end
  return attempts > 1 and 1 or 0
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
    bury(keys, id, reason, now)
  end
  redis.call('ZREM', LEASE, id)
  return end_without_worker(keys, id, record.epoch, ENDINGS[reason], now)
end

-- Whether a request that comes back keeps its arrival, and so comes before later ones. One with
-- tokens does, as its reader waits for more. One that has no tokens, or may have killed its workers,
-- arrives anew.
local function keeps_arrival(record)
  return tonumber(record.published) > 0 and tonumber(record.losses or '0') < SUSPICIOUS
end

-- Queues a request again.
local function enqueue(keys, id, record, is_kept, now)
  enter(keys, id, 'queued')
  wait_from(id, now, tonumber(record.deadline_ms))
  live_for(keys, SPAN_MS)
  local rank_it = is_kept and rank or rank_anew
  if rank_it(keys, id, record) then
    add_ticket(id, record.priority)
  end
  return 'queued'
end

-- Takes a running request from its worker and queues it again, or ends it when an end is due. The
-- record must agree with the log (see `agree`). `attempts` is the number that counts from now on.
-- `is_kept`: it keeps its arrival. Returns the state.
local function put_back(keys, id, record, attempts, is_kept, now)
  local reason = ending_due(record, attempts, now)
  if reason then
    return end_for(reason, keys, id, record, now)
  end
  record.epoch = int(tonumber(record.epoch) + 1)
  redis.call('HSET', keys.record, 'owner', '', 'attempts', int(attempts), 'epoch', record.epoch)
  redis.call('ZREM', LEASE, id)
  return enqueue(keys, id, record, is_kept, now)
end

-- Takes surplus tickets of a class, the oldest ones, up to `most`. They are read as a member of the
-- group and only then deleted, so that the group's lag stays known. Returns how many there were.
local function take_surplus(priority, most)
  local stream, count = ingress_of(priority), math.min(most, surplus_of(priority))
  if count <= 0 then
    return 0
  end
  local function read()
    return redis.pcall('XREADGROUP', 'GROUP', 'workers', TICKETS, 'COUNT', count, 'NOACK',
      'STREAMS', stream, '>')
  end
  local found = read()
  if found and found.err then
    -- The stream was lost with its group, and has come back without it.
    redis.pcall('XGROUP', 'CREATE', stream, 'workers', '0')
    found = read()
  end
  -- Another error reply has no entries: a claim does not fail for want of a ticket.
  local first = found and found[1]
  -- The in-memory Redis of the tests answers a script by the third protocol: a flat map.
  local entries = first and (type(first) == 'table' and first[2] or found[2]) or {}
  for _, entry in ipairs(entries) do
    redis.call('XDEL', stream, entry[1])
  end
  return #entries
end
