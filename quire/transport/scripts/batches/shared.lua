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

-- The statuses from which a batch goes on.
local OPEN = { validating = true, in_progress = true, finalizing = true, cancelling = true }

-- Whether this claim holds the batch. Every write of a batcher begins with it: a batcher that lost
-- its lease while it was frozen has an older epoch.
local function holds(batch, epoch, owner)
  local held = redis.call('HMGET', batch, 'epoch', 'owner')
  return held[1] == epoch and held[2] == owner
end
