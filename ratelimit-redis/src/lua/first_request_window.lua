-- The window that begins with the first request: a count that lives for one period.
--
-- The state is when the first request came and what has been admitted since. The Rust twin is
-- first_request_window.rs in ratelimit-core. What an algorithm
-- here is made of, and where the helpers come from, stands at the head of gcra.lua.

local first_request_window = numbers('first-request-window', { 'start', 'count' })
first_request_window.parameters = { 'limit', 'window_us' }

-- The window that a request at `now` falls into. A request from before its start, by a clock that
-- went back, falls into it too.
local function window(limit, state, now)
  -- A state written under a larger limit owes no more than this limit.
  if state and now < state.start + limit.window_us then
    return { start = state.start, count = math.min(state.count, limit.limit) }
  end
  return { start = now, count = 0 }
end

local function decision(limit, now, cost, now_window, fits)
  local end_us = now_window.start + limit.window_us - now
  return {
    allowed = fits,
    remaining = math.max(limit.limit - now_window.count, 0),
    retry_after_us = fits and 0 or cost > limit.limit and NEVER or end_us,
    reset_after_us = now_window.count == 0 and 0 or end_us,
  }
end

local function admitted(limit, now, cost, now_window, count)
  local state = { start = now_window.start, count = count }
  local answer = decision(limit, now, cost, state, true)
  if count == now_window.count then return answer end
  if count == 0 then return answer, 'remove' end
  return answer, 'put', state, state.start + limit.window_us
end

function first_request_window.step(limit, state, now, cost)
  local now_window = window(limit, state, now)
  if cost > math.max(limit.limit - now_window.count, 0) then
    return decision(limit, now, cost, now_window, false)
  end
  return admitted(limit, now, cost, now_window, now_window.count + cost)
end

function first_request_window.refund(limit, state, now, cost)
  local now_window = window(limit, state, now)
  return admitted(limit, now, cost, now_window, math.max(now_window.count - cost, 0))
end

function first_request_window.force(limit, state, now, cost)
  local now_window = window(limit, state, now)
  local left = math.max(limit.limit - now_window.count, 0)
  return admitted(limit, now, cost, now_window, now_window.count + math.min(cost, left))
end

-- Charges a request that does not fit as far as there is room.
function first_request_window.fill(limit, state, now, charge)
  return select(2, first_request_window.force(limit, state, now, charge))
end

-- A charge goes into the window that began then.
function first_request_window.mark(state)
  return state.start
end

return first_request_window
