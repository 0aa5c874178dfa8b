-- COMMIT: publish the tokens of many requests, each judged by its own fence.
--
-- KEYS  those of running.lua with one request per item
-- ARGV  per item: id, epoch, owner, index of the first token, number of tokens, tokens, text,
--       text ends or '', terminal record or '', terminal state or '', and to extend the hash of
--       the log (see history.py) two powers and two hashes
-- Returns per item {ok | fenced | rewind | replayed, tokens in the log, cancel flag}.

local NUM_ARGUMENTS = 14
local PRIMES = { 33554393, 33554383 }
local now = now_ms()
local expiry = int(now + LEASE_MS)
local leases = {} -- expiry and id of each lease to renew, one after the other

-- The hash of the log once the item is in it; nil for a log that began before there were hashes.
local function extended(record, item, published)
  local prefix = record.prefix or (published == 0 and '0.0')
  if not prefix then
    return nil
  end
  local first, second = string.match(prefix, '^(%d+)%.(%d+)$')
  local powers, hashes = item.powers, item.hashes
  return int((tonumber(first) * powers[1] + hashes[1]) % PRIMES[1]) .. '.'
    .. int((tonumber(second) * powers[2] + hashes[2]) % PRIMES[2])
end

local function append(keys, record, item, published)
  local last = int(published + item.count - 1)
  local entry = { 'from', int(item.start), 'ids', item.ids, 'text', item.text }
  if item.ends ~= '' then
    entry[7], entry[8] = 'ends', item.ends
  end
  local changes = { 'published', int(published + item.count) }
  local prefix = extended(record, item, published)
  if prefix then
    entry[#entry + 1], entry[#entry + 2] = 'prefix', prefix
    changes[3], changes[4] = 'prefix', prefix
  end
  if not record.first_token_ms then
    changes[#changes + 1], changes[#changes + 2] = 'first_token_ms', int(now)
  end
  redis.call('XADD', keys.output, last .. '-' .. item.epoch, unpack(entry))
  redis.call('HSET', keys.record, unpack(changes))
end

local function commit(keys, item)
  local record = fields_of(keys, 'state', 'epoch', 'owner', 'published', 'cancel',
    'first_token_ms', 'prefix')
  local cancel = record.cancel == '1' and 1 or 0
  if not holds(record, item.epoch, item.owner) then
    -- The end that this very claim wrote is here already: its reply was lost.
    local mine = record.state and record.epoch == item.epoch and record.owner == item.owner
    return { mine and 'replayed' or 'fenced', mine and tonumber(record.published) or 0, cancel }
  end
  local newest = agree(keys, record)
  local published = tonumber(record.published)
  if newest.done then
    local mine = newest.epoch == item.epoch
    redis.call('ZREM', LEASE, item.id)
    settle(keys, item.id, item.epoch, newest.state, now)
    return { mine and 'replayed' or 'fenced', mine and published or 0, cancel }
  end
  local replay = item.start < published
  local ends_here = item.done ~= '' and item.start + item.count == published
  if item.start > published then
    return { 'rewind', published, cancel }
  elseif replay and not ends_here then
    return { 'replayed', published, cancel }
  end
  if item.count > 0 and not replay then
    append(keys, record, item, published)
    published = published + item.count
  end
  if item.done ~= '' then
    redis.call('ZREM', LEASE, item.id)
    write_end(keys, item.id, item.epoch, item.state, item.done, now)
  else
    leases[#leases + 1], leases[#leases + 2] = expiry, item.id
    keep(keys, keys.output)
  end
  return { 'ok', published, cancel }
end

-- The usual item: more tokens, and no end, for a log that has begun and agrees with its record. Nil
-- for any other. Most of what workers ask of Redis is this, so it spares tables and calls: what a
-- half-written commit left would lie beyond the record's place, and HEARTBEAT renews the keys' life.
local function extend(keys, at)
  local found = redis.call('HMGET', keys.record, 'state', 'epoch', 'owner', 'published', 'cancel',
    'prefix')
  local epoch, start, published = ARGV[at + 1], ARGV[at + 3], found[4]
  if found[1] ~= 'running' or found[2] ~= epoch or found[3] ~= ARGV[at + 2] or published ~= start
    or published == '0' or not found[6] or ARGV[at + 7] ~= '' or ARGV[at + 8] ~= ''
    or #redis.call('XRANGE', keys.output, published, '+', 'COUNT', 1) > 0 then
    return nil
  end
  local first, second = string.match(found[6], '^(%d+)%.(%d+)$')
  local prefix = string.format('%.0f.%.0f', (first * ARGV[at + 10] + ARGV[at + 12]) % PRIMES[1],
    (second * ARGV[at + 11] + ARGV[at + 13]) % PRIMES[2])
  local tokens = start + ARGV[at + 4]
  local entry_id = string.format('%.0f-%s', tokens - 1, epoch)
  if not redis.call('XADD', keys.output, 'NOMKSTREAM', entry_id, 'from', start, 'ids', ARGV[at + 5],
    'text', ARGV[at + 6], 'prefix', prefix) then
    return nil -- The log is gone.
  end
  redis.call('HSET', keys.record, 'published', int(tokens), 'prefix', prefix)
  leases[#leases + 1], leases[#leases + 2] = expiry, ARGV[at]
  return { 'ok', tokens, found[5] == '1' and 1 or 0 }
end

local function item_at(at)
  return {
    id = ARGV[at], epoch = ARGV[at + 1], owner = ARGV[at + 2], start = tonumber(ARGV[at + 3]),
    count = tonumber(ARGV[at + 4]), ids = ARGV[at + 5], text = ARGV[at + 6], ends = ARGV[at + 7],
    done = ARGV[at + 8], state = ARGV[at + 9],
    powers = { tonumber(ARGV[at + 10]), tonumber(ARGV[at + 11]) },
    hashes = { tonumber(ARGV[at + 12]), tonumber(ARGV[at + 13]) },
  }
end

local replies = {}
for at = FIRST, #ARGV, NUM_ARGUMENTS do
  local keys = take_keys(ARGV[at])
  replies[#replies + 1] = extend(keys, at) or commit(keys, item_at(at))
end
if #leases > 0 then
  redis.call('ZADD', LEASE, unpack(leases))
end
return replies
