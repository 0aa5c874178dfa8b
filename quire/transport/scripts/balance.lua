-- BALANCE: make the tickets of each class as many as its requests that wait.
--
-- KEYS  those of running.lua, then ingress of resumed requests by priority
-- ARGV  ms after which a delivery counts as left by its worker, the most entries per stream
-- Returns how many entries were used up, and how many requests that an older version had queued
-- were put into the rank sets. Cancelled and expired requests leave surplus tickets. Workers of
-- older versions leave deliveries when they die, and add entries to the streams of resumed requests.

local min_idle, most = ARGV[FIRST], tonumber(ARGV[FIRST + 1])
local used, adopted = 0, 0

local function count(num_used, num_adopted)
  used, adopted = used + num_used, adopted + num_adopted
end

-- Takes what was delivered to workers of older versions and left by them.
local function take_left(stream, priority)
  local found = redis.pcall('XAUTOCLAIM', stream, 'workers', TICKETS, min_idle, '0-0', 'COUNT', most)
  local entries = found[2] or {}
  for _, entry in ipairs(entries) do
    if entry and entry[1] then
      redis.call('XACK', stream, 'workers', entry[1])
    end
  end
  count(#entries, use_up(stream, priority, entries))
end

for priority = 0, 3 do
  local stream, resumed = ingress_of(priority), KEYS[next_key + priority]
  for _, each in ipairs({ resumed, stream }) do
    if redis.call('XLEN', each) > 0 then
      take_left(each, priority)
    end
  end
  count(take_tickets(resumed, priority, most))
  count(take_surplus(priority, most))
end
return { used, adopted }
