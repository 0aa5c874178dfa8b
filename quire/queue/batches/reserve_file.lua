-- Makes the record of a file whose content comes next. Until it is published, it is in no list.
--
-- KEYS: file, ends. ARGV: id, ms until it is given up, then fields and values.
-- Replies 1, or 0 if there is a file with this id.

if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
local due = now_ms() + tonumber(ARGV[2])
redis.call('HSET', KEYS[1], 'state', 'reserved')
set_fields(KEYS[1], 3)
redis.call('ZADD', KEYS[2], int(due), 'file:' .. ARGV[1])
return 1
