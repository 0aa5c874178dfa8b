-- Shared by the scripts of files and batches; put before the text of each.
--
-- They have arguments of their own only: the settings of a queue's scripts do not matter to them.
-- All numbers are milliseconds of Redis' own clock.

-- Lua writes large numbers with an exponent; Redis must never see one.
local function int(number)
  return string.format('%.0f', number)
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Sets the fields that are named by the arguments from `first` on: name, value, name, value.
local function set_fields(key, first, last)
  for index = first, last or #ARGV, 2 do
    redis.call('HSET', key, ARGV[index], ARGV[index + 1])
  end
end

-- About how many deleted files, or batches, of a tenant are remembered, and for how long.
local MAX_DELETED, DELETED_MS = 1000, 86400000

-- Takes an id out of the index of its tenant. When it was created stays known for a while, because
-- a reader of the list may come back with the id as its cursor. Redis without memory does not keep
-- it.
local function leave_index(index, deleted, id)
  local created = redis.call('ZSCORE', index, id)
  if created then
    redis.pcall('XADD', deleted, 'MAXLEN', '~', MAX_DELETED, '*', 'id', id, 'created', created)
    redis.call('PEXPIRE', deleted, DELETED_MS)
    redis.call('ZREM', index, id)
  end
end

-- The statuses from which a batch goes on.
local OPEN = { validating = true, in_progress = true, finalizing = true, cancelling = true }

-- About how many ends the queue keeps, unless operators set another number (see ends.lua).
local MAX_ENDS = 10000

-- How many ends one look examines.
local ENDS_PER_LOOK = 1000

-- Adds the end of a batch to the ends of the queue. Call it directly after the write of the status:
-- a torn file then lacks nothing, or this end alone, which the next claim tells.
local function tell_batch(id, batch, ends, control)
  local most = tonumber(redis.call('HGET', control, 'ends') or '') or MAX_ENDS
  if most <= 0 then
    return
  end
  local fields = redis.call('HMGET', batch, 'tenant', 'status', 'created_ms', 'total', 'completed',
    'failed')
  local function add_end()
    return redis.pcall('XADD', ends, 'MAXLEN', '~', int(most), '*', 'batch', id,
      'tenant', fields[1] or 'default', 'state', fields[2] or '', 'submitted_ms', fields[3] or '0',
      'total', fields[4] or '0', 'completed', fields[5] or '0', 'failed', fields[6] or '0')
  end
  local added = add_end()
  if type(added) == 'table' and added.err then
    -- The key holds what no script wrote.
    redis.call('DEL', ends)
    add_end()
  end
end

-- Whether the end of a batch was told, of the same creation: after a loss the id may come again.
local function is_batch_told(id, batch, ends)
  local status = redis.call('HGET', batch, 'status')
  local known = redis.call('HMGET', batch, status .. '_ms', 'created_ms')
  local last = '+'
  while true do
    local found = redis.pcall('XREVRANGE', ends, last, known[1] or '-', 'COUNT', ENDS_PER_LOOK)
    for _, entry in ipairs(found) do
      local fields = {}
      for index = 1, #entry[2], 2 do
        fields[entry[2][index]] = entry[2][index + 1]
      end
      if fields.batch == id and fields.submitted_ms == known[2] then
        return true
      end
      last = '(' .. entry[1]
    end
    -- An error reply has no entries.
    if #found < ENDS_PER_LOOK then
      return false
    end
  end
end

-- Whether this claim holds the batch. Every write of a batcher begins with it: a batcher that lost
-- its lease while it was frozen has an older epoch.
local function holds(batch, epoch, owner)
  local held = redis.call('HMGET', batch, 'epoch', 'owner')
  return held[1] == epoch and held[2] == owner
end
