-- COMMIT: publish tokens and ends of many requests, each checked against its own fence. Mostly the
-- first tokens of a claim and its end; EXTEND publishes most of those between.
--
-- KEYS  those of running.lua with one request per item
-- ARGV  the items, a line for each that ends with a newline: '<index of the first token> <index
--       after the last> <hash> <hash> <terminal state, activity or -> <epoch> <owner> <id>', the
--       hashes those of the item's own tokens (see history.py), after the id optionally
--       ' <fingerprint>' of what generated them; then per item tokens, text, and text ends or '';
--       then the terminal records of those items that have a terminal state
-- Returns a line per item: '<ok | fenced | rewind | replayed> <tokens in the log> <cancel flag>
-- <hash of the log or ->'. It renews no lease; only HEARTBEAT does.

local ITEM = '(%d+) (%d+) (%d+) (%d+) (%S+) (%d+) (%S*) (%S+) ?([^\n]*)\n'
local PRIME_1, PRIME_2 = 33554393, 33554383
local BASE_1, BASE_2 = 1000003, 7368787
local format, match = string.format, string.match
local now = now_ms()

-- What a worker may tell of a request that does not end. An item may tell it without tokens.
local ACTIVITIES = { waiting = true, prefilling = true, decoding = true, preempted = true }

-- The hash of a log once `count` tokens with these hashes of their own are in it.
local function extended(prefix, count, first, second)
  local power_1, power_2 = 1, 1
  for _ = 1, count do
    power_1, power_2 = power_1 * BASE_1 % PRIME_1, power_2 * BASE_2 % PRIME_2
  end
  local before_1, before_2 = match(prefix, '(%d+).(%d+)')
  return format('%d.%d', (before_1 * power_1 + first) % PRIME_1,
    (before_2 * power_2 + second) % PRIME_2)
end

local function append(keys, record, item, published)
  if published == 0 and item.fingerprint ~= '' then
    -- Before the tokens: if a crash keeps only half of this script, no log is without its
    -- fingerprint.
    redis.call('HSET', keys.record, 'fingerprint', item.fingerprint)
  end
  local entry = { 'from', int(item.start), 'ids', item.ids, 'text', item.text, 'at_ms', int(now) }
  if item.ends ~= '' then
    entry[9], entry[10] = 'ends', item.ends
  end
  local changes = { 'published', int(item.finish) }
  if item.activity then
    changes[3], changes[4] = 'activity', item.activity
  end
  -- A log without a hash, as one whose record was damaged, gets none.
  local prefix = record.prefix or (published == 0 and '0.0')
  if prefix then
    prefix = extended(prefix, item.finish - item.start, item.first, item.second)
    entry[#entry + 1], entry[#entry + 2] = 'prefix', prefix
    changes[#changes + 1], changes[#changes + 2] = 'prefix', prefix
  end
  if not record.first_token_ms then
    changes[#changes + 1], changes[#changes + 2] = 'first_token_ms', int(now)
  end
  redis.call('XADD', keys.output, int(item.finish - 1) .. '-' .. item.epoch, unpack(entry))
  redis.call('HSET', keys.record, unpack(changes))
  record.prefix = prefix
end

-- Sets the log position from which EXTEND may go on for this claim; not if the worker has to learn
-- of a cancellation, and not for a log without a hash. The words in the value are there to make it
-- long: Redis keeps a hash of short values as a list, which it searches from its beginning.
local function set_log_position(record, item)
  if record.cancel ~= '1' and record.prefix then
    redis.call('HSET', LOG_POSITIONS, item.id, format('epoch %s owner %s tokens %d hash %s',
      item.epoch, item.owner, item.finish, record.prefix))
  end
end

-- Judges an item. Returns its status, the tokens in the log, the cancel flag, and the hash.
local function commit(keys, item)
  local record = record_of(keys)
  local cancel = record.cancel == '1' and 1 or 0
  if not holds(record, item.epoch, item.owner) then
    -- If this claim itself wrote the end, its reply was lost: the item is replayed.
    local mine = record.state and record.epoch == item.epoch and record.owner == item.owner
    return mine and 'replayed' or 'fenced', mine and record.published or '0', cancel, '-'
  end
  local newest = agree(keys, record)
  local published = tonumber(record.published)
  if newest.done then
    local mine = newest.epoch == item.epoch
    redis.call('ZREM', LEASE, item.id)
    settle_again(keys, item.id, record, item.epoch, newest, now)
    return mine and 'replayed' or 'fenced', mine and record.published or '0', cancel, '-'
  end
  local replay = item.start < published
  local ends_here = item.done and item.finish == published
  if item.start > published then
    return 'rewind', record.published, cancel, record.prefix or '-'
  elseif replay and not ends_here then
    return 'replayed', record.published, cancel, record.prefix or '-'
  end
  local has_tokens = item.finish > item.start and not replay
  if has_tokens then
    append(keys, record, item, published)
  elseif item.activity then
    redis.call('HSET', keys.record, 'activity', item.activity)
  end
  if item.done then
    redis.call('ZREM', LEASE, item.id)
    write_end(keys, item.id, item.epoch, item.state, item.done, now)
  elseif has_tokens then
    keep(keys, keys.output)
    set_log_position(record, item)
  end
  return 'ok', int(item.finish), cancel, record.prefix or '-'
end

local at = FIRST + 1 -- of the item's tokens, text and text ends
local done_at = at + 3 * select(2, string.gsub(ARGV[FIRST], '\n', ''))

local replies = {}
for start, finish, first, second, state, epoch, owner, id, fingerprint in
  string.gmatch(ARGV[FIRST], ITEM) do
  local item = { id = id, epoch = epoch, owner = owner, start = tonumber(start),
    finish = tonumber(finish), first = first, second = second, ids = ARGV[at],
    text = ARGV[at + 1], ends = ARGV[at + 2], fingerprint = fingerprint }
  at = at + 3
  if ACTIVITIES[state] then
    -- With the owner: what an earlier claim told does not count for a later one.
    item.activity = state .. ' ' .. owner
  elseif state ~= '-' then
    item.state, item.done = state, ARGV[done_at]
    done_at = done_at + 1
  end
  replies[#replies + 1] = format('%s %s %d %s', commit(take_keys(id), item))
end
return table.concat(replies, '\n')
