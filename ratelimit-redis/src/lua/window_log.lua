-- The window log: a window that begins with the first request, and remembers who used it up.
--
-- The state is a list under a key of its own: an element for each request, "TIMESTAMP COST TOTAL
-- START METADATA", oldest first. TOTAL is what has been charged in the window up to and with it,
-- and START when the window began, so that the newest element is all that a decision reads.
-- METADATA is whatever the caller gave, any bytes. The Rust twin is window_log.rs in
-- ratelimit-core. README.md beside this file specifies a twin as a table and the helpers.

local window_log = { parameters = { 'limit', 'window_us' } }

-- The element at an index, the oldest at 0 and the newest at -1.
local function element_at(key, index)
  local element = call('LINDEX', key, index)
  if not element then return nil end
  local timestamp, cost, total, start, metadata = match(element, '^(%d+) (%d+) (%d+) (%d+) (.*)$')
  return {
    key = key,
    timestamp = integer(timestamp),
    cost = integer(cost),
    total = integer(total),
    start = integer(start),
    metadata = metadata,
  }
end

-- The list stays on the server; the newest element is what a step begins with.
function window_log.read(key)
  return element_at(key, -1)
end

-- The window's start and total.
function window_log.seen(_, newest)
  return newest and format('window-log %d %d', newest.start, newest.total) or ''
end

-- The first element whose total is at least so much, and its index.
local function element_of_total(key, total)
  local index = first_for(0, call('LLEN', key) - 1, function(index)
    return element_at(key, index).total >= total
  end)
  return element_at(key, index), index
end

function window_log.change(limit, newest, operation, cost, made)
  local after = { past = newest ~= nil, start = now, timestamp = now, total = 0 }
  -- A request from before the start, by a clock that went back, falls into the window too.
  if newest and now < newest.start + limit.window_us then
    after = { start = newest.start, timestamp = math.max(now, newest.timestamp), total = newest.total, goes_on = true }
  end
  -- A state written under a larger limit uses at most this limit: its first requests used it up.
  local left = math.max(limit.limit - after.total, 0)
  -- A charge is taken back from the window that it went into.
  if operation == 'undo' and not (newest and newest.start == made) then return true end
  if operation == 'give' or operation == 'undo' then
    -- Takes the cost off the newest entries: a refund undoes what was charged last.
    if cost == 0 or after.total == 0 then return true end
    if cost >= after.total then return true, 'remove' end
    after.total = after.total - cost
    after.last, after.index = element_of_total(newest.key, after.total)
    if after.last.total < after.total or after.last.total - after.last.cost >= after.total then error(CORRUPT) end
  else
    -- A forced charge, and an attempt that does not fit, are charged as far as there is room.
    if operation == 'force' or operation == 'fill' then cost = math.min(cost, left) end
    if cost > left then return false end
    if cost == 0 then return true end
    after.cost, after.total = cost, after.total + cost
  end
  return true, 'put', after, after.start + limit.window_us
end

local function element(timestamp, cost, total, start, metadata)
  return format('%d %d %d %d ', timestamp, cost, total, start) .. metadata
end

function window_log.put(key, _, after, ttl, metadata)
  local last = after.last
  if last then
    local cost = last.cost - (last.total - after.total)
    call('LTRIM', key, 0, after.index)
    call('LSET', key, -1, element(last.timestamp, cost, after.total, last.start, last.metadata))
  else
    if after.past then call('UNLINK', key) end
    local added = element(after.timestamp, after.cost, after.total, after.start, metadata)
    call(after.goes_on and 'RPUSHX' or 'RPUSH', key, added)
  end
  expire(key, ttl)
end

function window_log.remove(key)
  call('UNLINK', key)
end

-- A charge goes into the window that began then.
function window_log.mark(newest)
  return newest.start
end

return window_log
