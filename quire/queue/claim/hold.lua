-- HOLD: lets the pictures of claimed requests live on, for as long as these may wait again.
--
-- KEYS  the pictures
-- Returns a number per picture: 1 if it is stored, 0 if it has expired.

local found = {}
for index, key in ipairs(KEYS) do
  live_on(key, SPAN_MS)
  found[index] = redis.call('PTTL', key) == -2 and 0 or 1
end
return found
