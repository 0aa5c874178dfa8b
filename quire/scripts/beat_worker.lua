-- BEAT: note that a worker lives, and forget those that have been silent for too long.
--
-- KEYS  1 workers, 2 control, 3..10 ingress, of what is new and of what comes back
-- ARGV  worker, state, load (opaque), how long silence is remembered
-- Returns 1 if an operator wants the worker to drain, else 0. The wish stands until the worker says
-- that it does, so that a lost reply loses nothing.
-- A forgotten worker's consumers are deleted where nothing is pending for them; consumers are never
-- deleted by Redis itself, and deleting one with pending entries would lose those.

local workers, control = KEYS[1], KEYS[2]
local worker, state, load = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local memory = tonumber(ARGV[FIRST + 3])
local now = now_ms()

-- States in which there is nothing more to wish for.
local ENDS = { draining = true, stopped = true, failed = true }

-- Deletes the consumer unless something is pending for it; returns whether it is gone. A stream
-- that is not there, or not yet with its group, is an error reply without entries.
local function forget_consumer(stream, name)
  for _, consumer in ipairs(redis.pcall('XINFO', 'CONSUMERS', stream, 'workers')) do
    local info = {}
    for index = 1, #consumer, 2 do
      info[consumer[index]] = consumer[index + 1]
    end
    if info.name == name then
      if info.pending > 0 then
        return false
      end
      redis.call('XGROUP', 'DELCONSUMER', stream, 'workers', name)
    end
  end
  return true
end

local known = redis.call('HGETALL', workers)
for index = 1, #known, 2 do
  local name, seen = known[index], tonumber(string.match(known[index + 1], '^%d+'))
  if name ~= worker and (not seen or now - seen > memory) then
    local gone = true
    for stream = 3, #KEYS do
      gone = forget_consumer(KEYS[stream], name) and gone
    end
    if gone then
      redis.call('HDEL', workers, name)
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
-- A wish that is older than the memory was for a worker of the same name that never came back.
if ENDS[state] or now - wished > memory then
  redis.call('HDEL', control, wish)
  return 0
end
return 1
