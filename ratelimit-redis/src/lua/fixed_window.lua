-- The fixed window, aligned to the clock: a count that starts anew at every full period.
--
-- The state is when the window began and what has been admitted in it. The Rust twin is
-- fixed_window.rs in ratelimit-core. What an algorithm
-- here is made of, and where the helpers come from, stands at the head of gcra.lua.

local fixed_window = numbers('fixed-window', { 'start', 'count' })
fixed_window.parameters = { 'limit', 'window_us' }

local function aligned(limit, tick)
  return tick - math.fmod(tick, limit.window_us)
end

-- The window that a request at `now` falls into, and what has been admitted in it.
local function window(limit, state, now)
  local current = aligned(limit, now)
  -- A state from a later window: the clock went back, and the state's window counts. Its start is
  -- aligned anew, because it may have been written for another window. A state written under a larger
  -- limit owes no more than this limit.
  if state and aligned(limit, state.start) >= current then
    return { start = aligned(limit, state.start), count = math.min(state.count, limit.limit) }
  end
  return { start = current, count = 0 }
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

function fixed_window.step(limit, state, now, cost)
  local now_window = window(limit, state, now)
  if cost > math.max(limit.limit - now_window.count, 0) then
    return decision(limit, now, cost, now_window, false)
  end
  return admitted(limit, now, cost, now_window, now_window.count + cost)
end

function fixed_window.refund(limit, state, now, cost)
  local now_window = window(limit, state, now)
  return admitted(limit, now, cost, now_window, math.max(now_window.count - cost, 0))
end

function fixed_window.force(limit, state, now, cost)
  local now_window = window(limit, state, now)
  local left = math.max(limit.limit - now_window.count, 0)
  return admitted(limit, now, cost, now_window, now_window.count + math.min(cost, left))
end

-- When a charge counts as made: in the window that is charged.
function fixed_window.charged_at(limit, state, now)
  return math.max(window(limit, state, now).start, now)
end

-- Charges what is missing. Gives back what is too much within the window in which it was charged: what
-- was charged in one that is past counts no longer.
function fixed_window.settle(limit, state, now, hold, cost)
  if cost >= hold.cost then return fixed_window.force(limit, state, now, cost - hold.cost) end
  local counts = aligned(limit, hold.tick) == window(limit, state, now).start
  return fixed_window.refund(limit, state, now, counts and hold.cost - cost or 0)
end

-- Charges a request that does not fit as far as there is room.
function fixed_window.fill(limit, state, now, charge)
  return select(2, fixed_window.force(limit, state, now, charge))
end

return fixed_window
