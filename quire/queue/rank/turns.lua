-- Shared by the transitions of a request: the turns of a session, which run one after the other.
--
-- KEYS  1 open, 21 turn, 22 turns
--
-- A queued turn is parked while an earlier turn of its session is open: then it is in no rank set
-- and has no ticket, so no worker finds it. The script that ends the earlier turn ranks the next
-- one. It has not declared the record of that one, so `turn` holds what a rank needs.

local TURN, TURNS = KEYS[21], KEYS[22]

-- The entry of an open turn, or nil for a request without a session.
local function turn_of(id)
  local entry = redis.call('HGET', TURN, id)
  local number, moment, priority, deadline, session =
    string.match(entry or '', '^(%d+) (%d+) ([0-3]) (%d+) (%S+)$')
  if number then
    return { number = number, moment = moment, priority = priority, deadline_ms = deadline,
      session = session }
  end
  return nil
end

-- All members have the score 0, so Redis orders them by their bytes: the turns of a session are
-- neighbours, in the order of their numbers, which have 16 digits.
local function member_of(id, turn)
  return turn.session .. ' ' .. turn.number .. ' ' .. id
end

-- Writes the entry of a turn. Its fields: number, the arrival with which it joined its session;
-- moment, by which it is ranked; both in microseconds; priority; deadline_ms; and session, which is
-- '<tenant>:<session>'.
local function write_turn(id, turn)
  turn.number = string.format('%016.0f', tonumber(turn.number))
  redis.call('HSET', TURN, id, turn.number .. ' ' .. turn.moment .. ' ' .. turn.priority .. ' '
    .. int(tonumber(turn.deadline_ms)) .. ' ' .. turn.session)
  redis.call('ZADD', TURNS, 0, member_of(id, turn))
end

-- The first open turn of a session, or nil. Removes turns that have ended and did not leave their
-- session, as a torn file has them.
local function first_of(session)
  while true do
    local member = redis.call('ZRANGEBYLEX', TURNS, '[' .. session .. ' ', '(' .. session .. '!',
      'LIMIT', 0, 1)[1]
    local id = member and string.match(member, '(%S+)$')
    if not id or redis.call('HGET', KEYS[1], id) then
      return id
    end
    redis.call('ZREM', TURNS, member)
    redis.call('HDEL', TURN, id)
  end
end

-- Whether an earlier turn of its session is open. `turn` is from `turn_of`, and may be nil.
local function is_parked(id, turn)
  local first = turn and first_of(turn.session)
  return first ~= nil and first ~= id
end

-- Ranks the first open turn of a session if it is queued and not ranked.
local function rank_first(session)
  local id = first_of(session)
  local turn = id and turn_of(id)
  local state, tokens = string.match(id and redis.call('HGET', KEYS[1], id) or '', '^(%a+) (%d+) ')
  if turn and state == 'queued' and not redis.call('ZSCORE', ranks_of(turn.priority), id) then
    redis.call('ZADD', ranks_of(turn.priority),
      rank_of(turn.priority, tokens, turn.deadline_ms, turn.moment), id)
    add_ticket(id, turn.priority)
  end
end

-- The session and number of a turn as its record has them, or nil.
local function turn_in(record_key)
  local found = redis.call('HMGET', record_key, 'tenant', 'session', 'turn')
  local number = string.match(found[3] or '', '^%d+$')
  if found[1] and found[2] and number then
    return { session = found[1] .. ':' .. found[2],
      number = string.format('%016.0f', tonumber(number)) }
  end
  return nil
end

-- Removes a turn that has ended, and ranks the next one of its session. If the server has lost its
-- entry, the record tells which member it had.
local function leave_session(id, keys)
  local turn = turn_of(id) or turn_in(keys.record)
  if turn then
    redis.call('ZREM', TURNS, member_of(id, turn))
    redis.call('HDEL', TURN, id)
    rank_first(turn.session)
  end
end
