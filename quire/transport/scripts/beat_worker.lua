-- BEAT: note that a worker lives, and forget those that have been silent for too long.
--
-- KEYS  1 workers, 2 control, 3..6 ingress of new requests, 7..10 of resumed ones, by priority
-- ARGV  worker, state, load (opaque), after how many ms of silence a worker is forgotten
-- Returns 1 if an operator wants the worker to drain, else 0. The wish is kept until the worker's
-- state shows that it heard it, so that a lost reply loses nothing. The consumers of a forgotten
-- worker are deleted unless entries are pending for them, which would be lost. Redis never deletes
-- consumers by itself.

local workers, control = KEYS[1], KEYS[2]
local worker, state, load = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local memory = tonumber(ARGV[FIRST + 3])
local now = now_ms()

-- States that fulfil the wish.
local ENDS = { draining = true, stopped = true, failed = true }

-- Deletes the consumers that `is_gone` says, unless something is pending for them; returns how many
-- of them stay for that. A stream that is not there, or not yet with its group, is an error reply
-- without entries.
local function forget_consumers(stream, is_gone)
  local num_busy = 0
  for _, consumer in ipairs(redis.pcall('XINFO', 'CONSUMERS', stream, 'workers')) do
    local info = table_of(consumer)
    if is_gone(info) and info.pending > 0 then
      num_busy = num_busy + 1
    elseif is_gone(info) then
      redis.call('XGROUP', 'DELCONSUMER', stream, 'workers', info.name)
    end
  end
  return num_busy
end

local known = table_of(redis.call('HGETALL', workers))
for name, word in pairs(known) do
  local seen = tonumber(string.match(word, '^%d+'))
  if name ~= worker and (not seen or now - seen > memory) then
    local num_busy = 0
    for stream = 3, #KEYS do
      num_busy = num_busy + forget_consumers(KEYS[stream], function(info)
        return info.name == name
      end)
    end
    if num_busy == 0 then
      redis.call('HDEL', workers, name)
    end
  end
end

-- Where there was no worker for longer than that, the registry has gone, and with it the names of
-- those whose consumers and wishes are still there. So who comes new looks for what nobody signs for.
if not known[worker] then
  for stream = 3, #KEYS do
    forget_consumers(KEYS[stream], function(info)
      return info.name ~= worker and not known[info.name] and info.idle >= memory
    end)
  end
  for field, wished in pairs(table_of(redis.call('HGETALL', control))) do
    local is_wish = string.find(field, 'drain:', 1, true) == 1
    if is_wish and now - (tonumber(wished) or 0) > memory then
      redis.call('HDEL', control, field)
    end
  end
end

redis.call('HSET', workers, worker, int(now) .. ' ' .. state .. ' ' .. load)
redis.call('PEXPIRE', workers, int(memory))

local wish = 'drain:' .. worker
local wished = tonumber(redis.call('HGET', control, wish) or '')
if not wished then
  return 0
end
-- An older wish was meant for an earlier worker of this name, which was forgotten since.
if ENDS[state] or now - wished > memory then
  redis.call('HDEL', control, wish)
  return 0
end
return 1
