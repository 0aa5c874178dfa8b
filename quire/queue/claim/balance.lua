-- BALANCE: consume the tickets that each class has beyond its requests that wait.
--
-- KEYS  those of running.lua
-- ARGV  the most tickets per class
-- Returns how many were consumed. Cancelled and expired requests leave surplus tickets.

local most, used = tonumber(ARGV[FIRST]), 0
for priority = 0, 3 do
  used = used + take_surplus(priority, most)
end
return used
