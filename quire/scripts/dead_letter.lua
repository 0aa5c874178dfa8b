-- DEAD LETTER: end a claimed request that can never run, and keep its bytes for a person.
--
-- KEYS  1 record, 2 body, 3 output, 4 lease, 5 dead
-- ARGV  id, epoch, owner, reason, terminal record
-- Returns 1 when this claim ended the request, now or in an earlier call; 0 when it is fenced.

local id, epoch, owner = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local keys, lease, dead = keys_at(1), KEYS[4], KEYS[5]
local record = fields_of(keys, 'state', 'epoch', 'owner', 'attempts')

if not holds(record, epoch, owner) then
  return record.state and record.epoch == epoch and record.owner == owner and 1 or 0
end
bury(dead, keys, id, ARGV[FIRST + 3], record.attempts)
write_end(keys, id, lease, epoch, 'failed', ARGV[FIRST + 4], now_ms())
return 1
