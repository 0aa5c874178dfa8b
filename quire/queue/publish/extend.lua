-- EXTEND: publish more tokens of many requests where everything is as their worker believes.
--
-- KEYS  1 log positions, then the output log of each request
-- ARGV  the id of each request; then for each its log position before and after, the index of the
--       first token, the id of the entry, tokens, text, text ends or '', and the hash after them
-- Returns a character per request: + when its tokens are in the log, - when nothing was done; then
-- the caller asks COMMIT.
-- This is the most frequent transition, so it makes few calls. A log position names the claim, the
-- number of its tokens and their hash. COMMIT sets it. Whatever takes a request from its claim, or
-- has something to tell the claim's worker, deletes it: so comparing it is the whole fence.

local LOG_POSITIONS = KEYS[1]
local call, pcall = redis.call, redis.pcall
local num_requests = #KEYS - 1
local ROWS = FIRST + num_requests
local WIDTH = 8
local AT = int(now_ms())

-- The logs that already hold tokens at or beyond the index of the new ones, as on a server that
-- came back from a torn file. Nil if one of the keys is no stream, so that it cannot be found out.
local function logs_beyond()
  local streams = {}
  for number = 1, num_requests do
    streams[number] = KEYS[1 + number]
    streams[num_requests + number] = ARGV[ROWS + WIDTH * (number - 1) + 2]
  end
  local found = pcall('XREAD', 'COUNT', 1, 'STREAMS', unpack(streams)) or {}
  if found.err then
    return nil
  end
  local beyond = {}
  for _, log in ipairs(found) do
    beyond[log[1]] = true
  end
  return beyond
end

-- An error here is not reported: COMMIT will meet the same one.
local function append(output, at)
  local ends = ARGV[at + 6]
  if ends == '' then
    return pcall('XADD', output, 'NOMKSTREAM', ARGV[at + 3], 'from', ARGV[at + 2],
      'ids', ARGV[at + 4], 'text', ARGV[at + 5], 'at_ms', AT, 'prefix', ARGV[at + 7])
  end
  return pcall('XADD', output, 'NOMKSTREAM', ARGV[at + 3], 'from', ARGV[at + 2],
    'ids', ARGV[at + 4], 'text', ARGV[at + 5], 'at_ms', AT, 'ends', ends, 'prefix', ARGV[at + 7])
end

local beyond = logs_beyond()
if not beyond then
  return string.rep('-', num_requests)
end
local positions = pcall('HMGET', LOG_POSITIONS, unpack(ARGV, FIRST, ROWS - 1))
local replies, changes, at = {}, {}, ROWS
for number = 1, num_requests do
  local output, reply = KEYS[1 + number], '-'
  if positions[number] == ARGV[at] and not beyond[output] then
    -- The reply is the id of the entry, an error, or false if the log is gone.
    if type(append(output, at)) == 'string' then
      changes[#changes + 1], changes[#changes + 2] = ARGV[FIRST + number - 1], ARGV[at + 1]
      reply = '+'
    end
  end
  replies[number] = reply
  at = at + WIDTH
end
if #changes > 0 then
  call('HSET', LOG_POSITIONS, unpack(changes))
end
return table.concat(replies)
