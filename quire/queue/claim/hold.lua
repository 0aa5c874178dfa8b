-- HOLD: lets the pictures of claimed requests live on, for as long as these may wait again.
--
-- KEYS  the pictures
-- Returns a number per picture: 1 if it is stored, 0 if it has expired.

local found = {}
for index, key in ipairs(KEYS) do
  local left = redis.call('PTTL', key)
  if left >= 0 and left < SPAN_MS then
    redis.call('PEXPIRE', key, int(SPAN_MS))
  end
  found[index] = left == -2 and 0 or 1
end
return found
