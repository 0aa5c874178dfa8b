-- BEAT: note that a worker lives, and forget those that have been silent for too long.
--
-- KEYS  1 workers, 2 control
-- ARGV  worker, state, load (opaque), after how many ms of silence a worker is forgotten
-- Returns 1 if an operator wants the worker to drain, else 0. The wish is kept until the worker's
-- state shows that it heard it, so that a lost reply loses nothing.

local workers, control = KEYS[1], KEYS[2]
local worker, state, load = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local memory = tonumber(ARGV[FIRST + 3])
local now = now_ms()

-- States that fulfil the wish.
local ENDS = { draining = true, stopped = true, failed = true }

local known = table_of(redis.call('HGETALL', workers))
for name, word in pairs(known) do
  local seen = tonumber(string.match(word, '^%d+'))
  if name ~= worker and (not seen or now - seen > memory) then
    redis.call('HDEL', workers, name)
  end
end

-- Where there was no worker for longer than that, the registry has gone, and the wishes for its
-- workers are still there. So who comes new looks for those that are too old.
if not known[worker] then
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
