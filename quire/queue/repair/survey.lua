-- SURVEY: name the next open requests, so that in time each of them is looked at by RESTORE.
--
-- KEYS  1 open, 2 counts, 3 survey
-- ARGV  how many, ms to wait after them, ms to wait after the last ones, 1 to name them at once
-- Returns their ids, or a few more than asked for; none while it is too early. The cursor is kept
-- for all workers together, so that many of them look no more often than one.

local open, counts, survey = KEYS[1], KEYS[2], KEYS[3]
local number, pause, rest = ARGV[FIRST], tonumber(ARGV[FIRST + 1]), tonumber(ARGV[FIRST + 2])
-- The cursor of one that nobody has asked for so long is forgotten.
local MEMORY_MS = 86400000
local now = now_ms()

local kept = redis.call('HMGET', survey, 'cursor', 'due_ms')
local early = tonumber(kept[2] or '0') - now
-- More than that would be a clock that was put back.
if ARGV[FIRST + 3] ~= '1' and early > 0 and early <= rest then
  return {}
end
local found = redis.call('HSCAN', open, kept[1] or '0', 'COUNT', number)
local cursor, ids = found[1], {}
for index = 1, #found[2], 2 do
  ids[#ids + 1] = found[2][index]
end
redis.call('HSET', survey, 'cursor', cursor,
  'due_ms', int(now + (cursor == '0' and rest or pause)))
redis.call('PEXPIRE', survey, MEMORY_MS)
-- Without an open request nothing is counted: what is left has lost what it counted.
if redis.call('EXISTS', open) == 0 then
  redis.call('DEL', counts)
end
return ids
