-- CONDEMN: end a request whose keys hold what no transition wrote, so that it blocks no other.
--
-- KEYS  those of running.lua with one request
-- ARGV  id, reason, terminal record
-- Returns 1 when this call ended it, 0 when its keys are sound: then nothing is done.
-- Every other transition trusts these keys, and would fail on such a request for ever. What cannot
-- be read is deleted. What can be read is kept: the request in a dead letter, the tokens in the
-- log.

local id, reason, done = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local keys, now = take_keys(id), now_ms()

-- More tokens than any log has.
local MOST_TOKENS = 2 ^ 31

local is_damaged = false

-- Deletes a key whose type is wrong for the command. Any other error concerns the server, or the
-- rights of the user, and is raised.
local function delete_unless(key, command, ...)
  local found = redis.pcall(command, key, ...)
  if type(found) == 'table' and found.err then
    local said = tostring(found.err)
    assert(string.find(said, 'WRONGTYPE', 1, true), said)
    redis.call('DEL', key)
    is_damaged = true
  end
end

local function matches(pattern)
  return function(text)
    return string.find(text, pattern)
  end
end

-- With more digits, Lua could not tell a number from the next one.
local function is_number(text)
  return #text <= 15 and string.find(text, '^%d+$')
end

-- A moment in microseconds: an integer that a Lua number holds exactly.
local function is_moment(text)
  return string.find(text, '^%d+$') and #text <= 16
end

local function is_state(text)
  return WAITS[text] ~= nil or text == 'completed' or text == 'failed' or text == 'cancelled'
    or text == 'expired'
end

-- The check of each form in which fields are written.
local CHECKS = {
  state = is_state,
  priority = matches('^[0-3]$'),
  tenant = matches('^%S+$'),
  owner = matches('^%S*$'),
  session = matches('^[%w_.:-]+$'),
  number = is_number,
  moment = is_moment,
  hash = matches('^%d+%.%d+$'),
  share = matches('^%d+ %d+ %d+$'),
}

-- The epoch of the newest entry of the log, which what is written next must be above, and whether
-- that entry is an end.
local function mend_log()
  delete_unless(keys.output, 'XLEN')
  local newest = redis.call('XREVRANGE', keys.output, '+', '-', 'COUNT', 1)[1]
  local index, epoch = string.match(newest and newest[1] or '0-0', '^(%d+)-(%d+)$')
  if tonumber(index) >= MOST_TOKENS or tonumber(epoch) >= MOST_TOKENS then
    redis.call('DEL', keys.output)
    is_damaged = true
    return 0, false
  end
  return tonumber(epoch), newest ~= nil and table_of(newest[2]).done ~= nil
end

local function mend_record(newest_epoch)
  delete_unless(keys.record, 'HGET', 'state')
  local record = table_of(redis.call('HGETALL', keys.record))
  for name, form, rest in string.gmatch(FIELD_FORMS, '(%S+) (%S+)([^\n]*)\n') do
    local is_sound, instead, found = CHECKS[form], string.match(rest, "'(.*)'"), record[name]
    instead = instead == 'now' and int(now) or instead
    if (found and not is_sound(found)) or (instead and not found) then
      is_damaged = true
      if instead then
        redis.call('HSET', keys.record, name, instead)
      else
        redis.call('HDEL', keys.record, name)
      end
    end
  end
  if tonumber(redis.call('HGET', keys.record, 'epoch')) < newest_epoch then
    redis.call('HSET', keys.record, 'epoch', int(newest_epoch))
  end
end

local function mend_group()
  if keys.group then
    delete_unless(keys.group, 'HGET', 'queued')
    delete_unless(keys.members, 'SREM', '')
    delete_unless(keys.ended, 'XLEN')
  end
end

-- What an entry of the books counts for: its state, tokens and tenant; nothing if it cannot be read.
local function counted(entry)
  local state, tokens, tenant = string.match(entry, '^(%l+) (%d+) (.+)$')
  if WAITS[state] ~= nil and is_number(tokens) then
    return state, tonumber(tokens), tenant
  end
end

-- Puts a sound entry, for the end to strike out, in place of one that cannot be read. What that one
-- had counted for nobody knows, so everything is counted anew from all the others.
local function mend_books(record)
  local entry = redis.call('HGET', OPEN, id)
  if not entry or counted(entry) then
    return
  end
  is_damaged = true
  if record.state and WAITS[record.state] == nil then
    redis.call('HDEL', OPEN, id)
  else
    local state, tenant = record.state or 'queued', record.tenant or 'default'
    redis.call('HSET', OPEN, id, state .. ' 0 ' .. tenant)
  end
  local counts = { tokens = 0 }
  for _, other in pairs(table_of(redis.call('HGETALL', OPEN))) do
    local state, tokens, tenant = counted(other)
    if state then
      local name = 'tenant:' .. tenant
      counts.tokens = counts.tokens + (WAITS[state] and tokens or 0)
      counts[name] = (counts[name] or 0) + 1
    end
  end
  redis.call('DEL', COUNTS)
  for name, count in pairs(counts) do
    add(name, count)
  end
end

if redis.call('EXISTS', keys.record) == 0 then
  -- The request is gone, which every transition can handle if it can read the books.
  mend_group()
  mend_books({})
  if is_damaged then
    forget(keys, id)
    unrank(id)
  end
  return is_damaged and 1 or 0
end
local newest_epoch, has_end = mend_log()
delete_unless(keys.body, 'GET')
mend_group()
mend_record(newest_epoch)
local record = record_of(keys)
mend_books(record)
if WAITS[record.state] ~= nil and not has_end and redis.call('EXISTS', keys.body) == 0 then
  is_damaged = true
end
if not is_damaged then
  return 0
end

for _, times in ipairs({ LEASE, DELAY, WAIT }) do
  redis.call('ZREM', times, id)
end
-- One that had come to its end already is nothing to look at.
if WAITS[record.state] ~= nil and not has_end then
  bury(keys, id, reason, now)
end
end_without_worker(keys, id, record.epoch, { state = 'failed', done = done }, now)
unrank(id)
return 1
