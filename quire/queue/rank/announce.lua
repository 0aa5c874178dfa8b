-- ANNOUNCE: set the policy by which requests that wait are ranked.
--
-- KEYS  1 control, 2 survey
-- ARGV  policy, aging in ms, tokens that count as the largest size, 1 to replace another policy
-- Returns 1 when this changed the policy. The ranks of requests that wait are then computed anew by
-- RESTORE, so the survey of open requests begins again at once.

local control, survey = KEYS[1], KEYS[2]
local policy, aging, scale = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local found = redis.call('HMGET', control, 'policy', 'aging_ms', 'size_scale')

if found[1] and ARGV[FIRST + 3] ~= '1' then
  return 0
elseif found[1] == policy and found[2] == aging and found[3] == scale then
  return 0
end
-- This write comes first, so that a producer, who may not touch the survey, changes nothing.
redis.call('DEL', survey)
redis.call('HSET', control, 'policy', policy, 'aging_ms', aging, 'size_scale', scale)
return 1
