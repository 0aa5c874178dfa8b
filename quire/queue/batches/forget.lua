-- Deletes the record of a file whose content is gone, or of a batch whose time is over.
--
-- KEYS: record, ends, index, deleted ones. ARGV: `file` or `batch`, id. Replies 1 if there was a record.

leave_index(KEYS[3], KEYS[4], ARGV[2])
redis.call('ZREM', KEYS[2], ARGV[1] .. ':' .. ARGV[2])
return redis.call('DEL', KEYS[1])
