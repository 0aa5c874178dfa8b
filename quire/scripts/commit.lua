-- COMMIT: publish the tokens of many requests, each judged by its own fence.
--
-- KEYS  those of running.lua with one request per item
-- ARGV  the items, a line for each that ends with a newline: '<index of the first token> <index
--       after the last> <hash> <hash> <terminal state or -> <epoch> <owner> <id>', the hashes those
--       of the item's own tokens (see history.py); then per item tokens, text, and text ends or '';
--       then the terminal records of those items that have a terminal state
-- Returns a line per item: '<ok | fenced | rewind | replayed> <tokens in the log> <cancel flag>'.
-- Leases are HEARTBEAT's to renew.

local ITEM = '(%d+) (%d+) (%d+) (%d+) (%S+) (%d+) (%S*) ([^\n]+)\n'
local PRIME_1, PRIME_2 = 33554393, 33554383
local BASE_1, BASE_2 = 1000003, 7368787
local call, find, format, match = redis.call, string.find, string.format, string.match
local now = now_ms()

-- The bases to the power of a number of tokens, by that number.
local powers = {}

local function powers_of(count)
  local first, second = 1, 1
  for _ = 1, count do
    first, second = first * BASE_1 % PRIME_1, second * BASE_2 % PRIME_2
  end
  powers[count] = { first, second }
  return powers[count]
end

-- The hash of a log once `count` tokens with these hashes of their own are in it.
local function extended(prefix, count, first, second)
  local power = powers[count] or powers_of(count)
  local before_1, before_2 = match(prefix, '(%d+).(%d+)')
  return format('%d.%d', (before_1 * power[1] + first) % PRIME_1,
    (before_2 * power[2] + second) % PRIME_2)
end

local function append(keys, record, item, published)
  local entry = { 'from', int(item.start), 'ids', item.ids, 'text', item.text }
  if item.ends ~= '' then
    entry[7], entry[8] = 'ends', item.ends
  end
  local changes = { 'published', int(item.finish) }
  -- A log that began before there were hashes has none.
  local prefix = record.prefix or (published == 0 and '0.0')
  if prefix then
    prefix = extended(prefix, item.finish - item.start, item.first, item.second)
    entry[#entry + 1], entry[#entry + 2] = 'prefix', prefix
    changes[3], changes[4] = 'prefix', prefix
  end
  if not record.first_token_ms then
    changes[#changes + 1], changes[#changes + 2] = 'first_token_ms', int(now)
  end
  redis.call('XADD', keys.output, int(item.finish - 1) .. '-' .. item.epoch, unpack(entry))
  redis.call('HSET', keys.record, unpack(changes))
end

-- Judges any item. Returns its status, the tokens in the log, and the cancel flag.
local function commit(keys, item)
  local record = fields_of(keys, 'state', 'epoch', 'owner', 'published', 'cancel',
    'first_token_ms', 'prefix')
  local cancel = record.cancel == '1' and 1 or 0
  if not holds(record, item.epoch, item.owner) then
    -- The end that this very claim wrote is here already: its reply was lost.
    local mine = record.state and record.epoch == item.epoch and record.owner == item.owner
    return mine and 'replayed' or 'fenced', mine and record.published or '0', cancel
  end
  local newest = agree(keys, record)
  local published = tonumber(record.published)
  if newest.done then
    local mine = newest.epoch == item.epoch
    redis.call('ZREM', LEASE, item.id)
    settle(keys, item.id, item.epoch, newest.state, now)
    return mine and 'replayed' or 'fenced', mine and record.published or '0', cancel
  end
  local replay = item.start < published
  local ends_here = item.done and item.finish == published
  if item.start > published then
    return 'rewind', record.published, cancel
  elseif replay and not ends_here then
    return 'replayed', record.published, cancel
  end
  if item.finish > item.start and not replay then
    append(keys, record, item, published)
  end
  if item.done then
    redis.call('ZREM', LEASE, item.id)
    write_end(keys, item.id, item.epoch, item.state, item.done, now)
  else
    keep(keys, keys.output)
  end
  return 'ok', int(item.finish), cancel
end

-- How many items there are, and by their keys the logs that reach beyond the place where their item
-- begins: a commit whose reply was lost leaves them so, and a server that came back from a torn
-- file. One call for all; where a key holds no log, none is known to be as short as it should.
local function logs_beyond()
  local outputs, starts, key = {}, {}, next_key
  for start, group in string.gmatch(ARGV[FIRST], '(%d+)[^~\n]*(~?)[^\n]*\n') do
    starts[#starts + 1], outputs[#outputs + 1] = start, KEYS[key + 2]
    key = key + (group == '' and 3 or 6)
  end
  local places = { unpack(outputs) }
  for _, start in ipairs(starts) do
    places[#places + 1] = start
  end
  local found, beyond = redis.pcall('XREAD', 'COUNT', 1, 'STREAMS', unpack(places)) or {}, {}
  for index, output in ipairs(outputs) do
    beyond[output] = found.err or beyond[output]
  end
  for _, log in ipairs(found) do
    beyond[log[1]] = true
  end
  return #outputs, beyond
end

local num_items, beyond = logs_beyond()
local at = FIRST + 1 -- of the item's tokens, text and text ends
local done_at = at + 3 * num_items

-- The usual item: more tokens, and no end, for a log that has begun and is as long as its record
-- says. Nil for any other. Most of what workers ask of Redis is this, so it spares tables and calls.
local function extend(record, output, start, finish, first, second, epoch, owner)
  local found = call('HMGET', record, 'state', 'epoch', 'owner', 'published', 'cancel', 'prefix')
  if found[1] ~= 'running' or found[2] ~= epoch or found[3] ~= owner or found[4] ~= start
    or start == '0' or not found[6] or beyond[output] then
    return nil
  end
  local prefix = extended(found[6], finish - start, first, second)
  local entry_id, ends, added = format('%d-%s', finish - 1, epoch), ARGV[at + 2], nil
  if ends == '' then
    added = call('XADD', output, 'NOMKSTREAM', entry_id, 'from', start, 'ids', ARGV[at],
      'text', ARGV[at + 1], 'prefix', prefix)
  else
    added = call('XADD', output, 'NOMKSTREAM', entry_id, 'from', start, 'ids', ARGV[at],
      'text', ARGV[at + 1], 'ends', ends, 'prefix', prefix)
  end
  if not added then
    return nil -- The log is gone.
  end
  call('HSET', record, 'published', finish, 'prefix', prefix)
  return 'ok ' .. finish .. (found[5] == '1' and ' 1' or ' 0')
end

local function judge(start, finish, first, second, state, epoch, owner, id)
  local item = { id = id, epoch = epoch, owner = owner, start = tonumber(start),
    finish = tonumber(finish), first = first, second = second, ids = ARGV[at],
    text = ARGV[at + 1], ends = ARGV[at + 2] }
  if state ~= '-' then
    item.state, item.done = state, ARGV[done_at]
    done_at = done_at + 1
  end
  return format('%s %s %d', commit(take_keys(id), item))
end

local replies = {}
for start, finish, first, second, state, epoch, owner, id in string.gmatch(ARGV[FIRST], ITEM) do
  local record, output, reply = KEYS[next_key], KEYS[next_key + 2], nil
  if state == '-' and finish ~= start then
    reply = extend(record, output, start, finish, first, second, epoch, owner)
  end
  if reply then
    next_key = next_key + (find(id, '~', 1, true) and 6 or 3)
  else
    reply = judge(start, finish, first, second, state, epoch, owner, id)
  end
  replies[#replies + 1] = reply
  at = at + 3
end
return table.concat(replies, '\n')
