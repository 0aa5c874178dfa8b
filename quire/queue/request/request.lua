-- Shared by the transitions of a request: its keys, how it is counted, and how it ends.
--
-- KEYS  1 open, 2 counts, 3 delay, 4 control, 5 wait, 6..9 ingress by priority, 10 log positions,
--       11..14 rank by priority, 15 arrival (see ranking.lua), 16..19 fair by priority, 20 rate (see
--       fairness.lua), 21 turn, 22 turns (see turns.lua), 23 ends (see ends.lua); the scripts that
--       workers and operators call have two more (see running.lua); then the keys of each request
--       in turn.

local OPEN, COUNTS, DELAY, WAIT = KEYS[1], KEYS[2], KEYS[3], KEYS[5]
local LOG_POSITIONS = KEYS[10]

-- The states before the end, and whether the request waits in them.
local WAITS = { scheduled = true, queued = true, running = false }

local next_key = 24

-- The keys of the next request: three of its own, and three of its group if its id names one.
local function take_keys(id)
  local first, keys = next_key, {}
  keys.record, keys.body, keys.output = KEYS[first], KEYS[first + 1], KEYS[first + 2]
  next_key = first + 3
  if string.find(id, '~', 1, true) then
    keys.group, keys.members, keys.ended = KEYS[first + 3], KEYS[first + 4], KEYS[first + 5]
    next_key = first + 6
  end
  return keys
end

local function add_fields(record, key, names)
  for index, value in ipairs(redis.call('HMGET', key, unpack(names))) do
    record[names[index]] = value
  end
end

-- The fields of a record by name, of the large ones only those that are named. A missing field is
-- false.
local function record_of(keys, ...)
  local record = {}
  add_fields(record, keys.record, RECORD_FIELDS)
  if ... then
    add_fields(record, keys.record, { ... })
  end
  return record
end

-- Sets the expiry of all keys of a request. The keys of its group expire after those of all
-- members.
local function live_for(keys, milliseconds)
  for _, key in ipairs({ keys.record, keys.body, keys.output }) do
    redis.call('PEXPIRE', key, int(milliseconds))
  end
  if keys.group then
    local longest = math.max(milliseconds, redis.call('PTTL', keys.group))
    for _, key in ipairs({ keys.group, keys.members, keys.ended }) do
      redis.call('PEXPIRE', key, int(longest))
    end
  end
end

-- Adds to a count; a count of 0 has no field.
local function add(name, change)
  if change ~= 0 and redis.call('HINCRBY', COUNTS, name, int(change)) == 0 then
    redis.call('HDEL', COUNTS, name)
  end
end

-- The entry of an open request in OPEN: its state, its tokens and its tenant.
local function booked(id)
  local entry = redis.call('HGET', OPEN, id)
  if not entry then
    return { state = '', tokens = '0', tenant = '' }
  end
  local state, tokens, tenant = string.match(entry, '^(%a+) (%d+) (.+)$')
  -- Nobody could take back what such an entry had counted for: see CONDEMN.
  assert(WAITS[state] ~= nil, 'damaged books')
  return { state = state, tokens = tokens, tenant = tenant }
end

local function book_in_group(keys, id, from, to, tenant)
  -- A request that is queued again after its end may find the keys of its group expired.
  if tonumber(redis.call('HGET', keys.group, from) or '0') > 0 then
    redis.call('HINCRBY', keys.group, from, -1)
  end
  redis.call('HINCRBY', keys.group, to, 1)
  if WAITS[to] ~= nil then
    redis.call('SADD', keys.members, id)
  else
    redis.call('SREM', keys.members, id)
    redis.call('XADD', keys.ended, '*', 'id', id, 'state', to, 'tenant', tenant)
  end
end

-- Books that a request went `from` one state ('' for none) `to` another. All counts are kept here
-- and nowhere else, from the request's entry in OPEN and never from its record: so they stay right
-- even for a request whose record has expired.
local function book(keys, id, from, to, tokens, tenant)
  local was_open, is_open = WAITS[from] ~= nil, WAITS[to] ~= nil
  add('tokens', (WAITS[to] and tokens or 0) - (WAITS[from] and tokens or 0))
  if was_open ~= is_open then
    add('tenant:' .. tenant, is_open and 1 or -1)
  end
  if is_open then
    redis.call('HSET', OPEN, id, to .. ' ' .. int(tokens) .. ' ' .. tenant)
  else
    redis.call('HDEL', OPEN, id)
  end
  if WAITS[from] and not WAITS[to] then
    redis.call('ZREM', WAIT, id)
  end
  if from == 'queued' and to ~= 'queued' then
    unrank(id)
  end
  if was_open and not is_open then
    leave_session(id, keys)
  end
  if keys.group and from ~= to then
    book_in_group(keys, id, from, to, tenant)
  end
end

-- Brings a request into another state. Its log position is removed first: as long as it is there,
-- EXTEND adds tokens and checks nothing else.
local function enter(keys, id, state)
  redis.call('HDEL', LOG_POSITIONS, id)
  local now = booked(id)
  if now.state ~= '' then
    book(keys, id, now.state, state, tonumber(now.tokens), now.tenant)
  end
  redis.call('HSET', keys.record, 'state', state)
end

-- The arrival of a request that was queued before. A torn file may have its state and no arrival.
local function arrival_of(record)
  return record.arrival or int(tonumber(record.submitted_ms) * 1000)
end

-- The moment by which a request is ranked: its arrival, unless its tenant shares the class.
-- `record` has the fields arrival, submitted_ms and fair.
local function moment_of_record(record)
  return is_fair() and parts_of(record.fair) or arrival_of(record)
end

-- The time that presses: the deadline, or the end of the target latency if that is earlier; 0 for
-- none. `record` has the fields deadline_ms and due_ms.
local function pressing_of(record)
  local deadline, due = tonumber(record.deadline_ms), tonumber(record.due_ms or '0')
  if due > 0 and (deadline == 0 or due < deadline) then
    return due
  end
  return deadline
end

-- The rank of a queued request. `record` has the fields priority, deadline_ms, due_ms, arrival,
-- submitted_ms and fair.
local function rank_of_record(id, record)
  local moment = moment_of_record(record)
  return rank_of(record.priority, booked(id).tokens, pressing_of(record), moment)
end

-- Puts a queued request into the rank set of its class, unless it is parked. `record` as in
-- `rank_of_record`. Returns whether it is ranked; then it needs a ticket.
local function rank(keys, id, record)
  redis.call('HSET', keys.record, 'arrival', arrival_of(record))
  local turn = turn_of(id)
  if turn then
    turn.moment, turn.deadline_ms = moment_of_record(record), pressing_of(record)
    write_turn(id, turn)
    if is_parked(id, turn) then
      rank_first(turn.session)
      return false
    end
  end
  redis.call('ZADD', ranks_of(record.priority), rank_of_record(id, record), id)
  return true
end

-- Makes a request the last turn of its session. `number` is a new arrival, and `record` has the
-- fields priority, deadline_ms, tenant and session.
local function join_session(keys, id, record, number)
  redis.call('HSET', keys.record, 'session', record.session, 'turn', number)
  write_turn(id, { number = number, moment = number, priority = record.priority,
    deadline_ms = record.deadline_ms, session = record.tenant .. ':' .. record.session })
end

-- Puts a request that is queued now into the rank set of its class, as `rank` does. `record` has
-- the fields priority, deadline_ms, fair: what was counted for its tenant when it arrived before,
-- and number: an arrival that this call gave to it already, or nil.
local function rank_anew(keys, id, record)
  local now = booked(id)
  record.arrival = record.number or new_arrival()
  if record.fair then
    give_back_share(record.priority, now.tenant, record.fair, 1, false)
    redis.call('HDEL', keys.record, 'fair')
    record.fair = false
  end
  if is_fair() then
    record.fair = share_of(record.priority, now.tenant, tonumber(now.tokens), record.arrival)
    redis.call('HSET', keys.record, 'fair', record.fair)
  end
  return rank(keys, id, record)
end

-- Puts a queued request that is missing from its rank set back, with a ticket if one is missing.
-- Returns whether it was missing. A parked turn belongs in no rank set. `record` as in
-- `rank_of_record`.
local function rank_again(keys, id, record)
  local is_missing = not redis.call('ZSCORE', ranks_of(record.priority), id)
  if is_parked(id, turn_of(id)) then
    unrank(id)
    is_missing = false
  elseif is_missing then
    rank(keys, id, record)
  end
  if surplus_of(record.priority) < 0 then
    add_ticket(id, record.priority)
  end
  return is_missing
end

-- Removes a request from the books whose keys have expired before its end.
local function forget(keys, id)
  local now = booked(id)
  if now.state ~= '' then
    redis.call('HDEL', LOG_POSITIONS, id)
    book(keys, id, now.state, 'expired', tonumber(now.tokens), now.tenant)
    live_for(keys, RETENTION_MS)
  end
end

-- Sets until when a request may wait: its deadline, but no longer than the queue allows from
-- `start` on.
local function wait_from(id, start, deadline)
  local latest = start + MAX_QUEUE_MS
  if deadline > 0 then
    latest = math.min(latest, deadline)
  end
  redis.call('ZADD', WAIT, int(latest), id)
end

-- Makes a record agree with its log, in Redis and in `record`. They differ because EXTEND writes
-- only the log, or because a server came back from a torn file that holds only half of a script:
-- the entry, but not what the script wrote after it. Readers have seen the log, so the log is
-- right. Returns its newest entry: epoch, and for an end `done`, the state and finished_ms.
local function agree(keys, record)
  local newest = redis.call('XREVRANGE', keys.output, '+', '-', 'COUNT', 1)[1]
  local tokens, fields, index, epoch = 0, {}, nil, nil
  if newest then
    index, epoch = string.match(newest[1], '^(%d+)-(%d+)$')
    fields = table_of(newest[2])
    tokens = tonumber(index) + (fields.done and 0 or 1)
  end
  if tokens ~= tonumber(record.published) then
    record.published, record.prefix = int(tokens), fields.prefix
    redis.call('HSET', keys.record, 'published', record.published)
    if fields.prefix then
      redis.call('HSET', keys.record, 'prefix', fields.prefix)
    else
      redis.call('HDEL', keys.record, 'prefix')
    end
  end
  return { epoch = epoch, done = fields.done, state = fields.state,
    finished_ms = fields.finished_ms }
end

-- Whether the body of a request that ends is kept with its results: if operators said so, and it
-- has no more bytes than they said.
local function keeps_body(keys)
  local most = tonumber(redis.call('HGET', CONTROL, 'keep_prompts') or '') or 0
  if most <= 0 then
    return false
  end
  local body = redis.pcall('GET', keys.body)
  return type(body) == 'string' and #body <= most
end

-- Ends a request whose log has its terminal entry: record, counts and keys. Its tenant gets back
-- what was counted and not used. `record` agrees with the log. Returns the state.
local function settle(keys, id, record, epoch, state, now)
  if record.fair or record.rate then
    local entry = booked(id)
    give_back(record, entry.tenant, tonumber(entry.tokens))
  end
  redis.call('HDEL', keys.record, unpack(END_FIELDS))
  redis.call('HSET', keys.record, 'epoch', epoch, 'finished_ms', int(now))
  enter(keys, id, state)
  if not keeps_body(keys) then
    redis.call('DEL', keys.body)
  end
  live_for(keys, RETENTION_MS)
  return state
end

-- Ends a request whose log has its terminal entry, `newest`, and whose record does not say so. That
-- is how a torn file leaves it: the end was told with the entry, or not. `record` agrees with the
-- log. Returns the state.
local function settle_again(keys, id, record, epoch, newest, now)
  if not is_told(id, record, newest.finished_ms) then
    tell(id, record, newest.state, newest.done)
  end
  return settle(keys, id, record, epoch, newest.state, now)
end

-- Writes the terminal entry: the caller's message, and beside it the stamps that only Redis knows.
-- Returns the state, which is another one if the log has an end already.
local function write_end(keys, id, epoch, state, done, now)
  local record = record_of(keys, 'metadata')
  local newest = agree(keys, record)
  if newest.done then
    return settle_again(keys, id, record, epoch, newest, now)
  end
  local entry = { 'done', done, 'state', state, 'attempts', record.attempts, 'resumes',
    record.resumes, 'submitted_ms', record.submitted_ms, 'finished_ms', int(now) }
  for _, name in ipairs({ 'claimed_ms', 'first_token_ms', 'metadata', 'prefix' }) do
    if record[name] then
      entry[#entry + 1] = name
      entry[#entry + 1] = record[name]
    end
  end
  redis.call('XADD', keys.output, record.published .. '-' .. epoch, unpack(entry))
  tell(id, record, state, done)
  return settle(keys, id, record, epoch, state, now)
end

-- Ends a request without a worker. A new epoch and no owner: whoever still runs it is fenced, and
-- the entry gets an id above all others even if the request was never claimed. Returns the state.
local function end_without_worker(keys, id, epoch, ending, now)
  redis.call('HSET', keys.record, 'owner', '')
  return write_end(keys, id, int(tonumber(epoch) + 1), ending.state, ending.done, now)
end
