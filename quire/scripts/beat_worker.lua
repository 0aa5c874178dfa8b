-- BEAT: note that a worker lives, and forget those that have been silent for too long.
--
-- KEYS  1 workers, 2..9 ingress, of what is new and of what comes back
-- ARGV  worker, state, load (opaque), how long silence is remembered
-- A forgotten worker's consumers are deleted where nothing is pending for them; consumers are never
-- deleted by Redis itself, and deleting one with pending entries would lose those.

local workers = KEYS[1]
local worker, state, load = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local memory = tonumber(ARGV[FIRST + 3])
local now = now_ms()

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
    for stream = 2, #KEYS do
      gone = forget_consumer(KEYS[stream], name) and gone
    end
    if gone then
      redis.call('HDEL', workers, name)
    end
  end
end

redis.call('HSET', workers, worker, int(now) .. ' ' .. state .. ' ' .. load)
redis.call('PEXPIRE', workers, int(memory))
return 1
