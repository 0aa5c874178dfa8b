-- Shared by the transitions of a request: the ends of the queue, each told once.
--
-- KEYS  4 control, 23 ends

local ENDS = KEYS[23]

-- About how many ends are kept, unless operators set another number; 0 tells none.
local MAX_ENDS = 10000

-- How many ends one look examines.
local ENDS_PER_LOOK = 1000

-- Adds the end of a request to the ends of the queue. `record` has the fields tenant, priority,
-- submitted_ms and published. Call it directly after the write of the terminal entry: a torn file
-- then lacks nothing, or this end alone, which `is_told` finds out.
local function tell(id, record, state, done)
  local most = tonumber(redis.call('HGET', CONTROL, 'ends') or '') or MAX_ENDS
  if most <= 0 then
    return
  end
  local function add_end()
    return redis.pcall('XADD', ENDS, 'MAXLEN', '~', int(most), '*', 'id', id, 'tenant',
      record.tenant or 'default', 'priority', record.priority or '1', 'submitted_ms',
      record.submitted_ms or '0', 'tokens', record.published, 'state', state, 'done', done)
  end
  local added = add_end()
  if type(added) == 'table' and added.err then
    -- The key holds what no script wrote. It must not keep requests from their ends.
    redis.call('DEL', ENDS)
    add_end()
  end
end

-- Whether this end of a request was told. `record` has the field submitted_ms: an earlier request
-- may have had the id. Every end that was told since has a later entry than `finished_ms`.
local function is_told(id, record, finished_ms)
  local last = '+'
  while true do
    local found = redis.pcall('XREVRANGE', ENDS, last, finished_ms or '-', 'COUNT', ENDS_PER_LOOK)
    for _, entry in ipairs(found) do
      local fields = table_of(entry[2])
      if fields.id == id and fields.submitted_ms == record.submitted_ms then
        return true
      end
      last = '(' .. entry[1]
    end
    -- An error reply has no entries.
    if #found < ENDS_PER_LOOK then
      return false
    end
  end
end
