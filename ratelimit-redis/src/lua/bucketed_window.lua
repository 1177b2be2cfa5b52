-- The bucketed window: a count per bucket, summed over several windows.
--
-- A window of n buckets is the current bucket and the n - 1 before it. The state is the buckets in
-- which something was admitted, oldest first, as text in a field of the identifier's hash: their
-- starts and counts in turn. The Rust twin is bucketed_window.rs in ratelimit-core. What an algorithm
-- here is made of, and where the helpers come from, stands at the head of gcra.lua.

local bucketed_window = number_pairs('bucketed-window', 'start', 'count')
bucketed_window.parameters = {
  'bucket_us', 'limit1', 'span1_us', 'limit2', 'span2_us', 'limit3', 'span3_us', 'limit4', 'span4_us',
}

local function aligned(limit, tick)
  return tick - math.fmod(tick, limit.bucket_us)
end

-- When a bucket stops to count in a window: when the one begins that is a window's length later. Its
-- start is aligned anew, because it may have been written for other buckets.
local function end_us(limit, bucket, span_us)
  return aligned(limit, bucket.start) + span_us
end

-- What is seen when the current bucket begins at `current`: the windows with what is `used` of each, the
-- length of the longest, and the buckets that count in that. In one pass: there may be many buckets.
local function seen_at(limit, current, state)
  local windows, longest_us, buckets = {}, 0, {}
  for n = 1, 4 do
    local most, span_us = limit['limit' .. n], limit['span' .. n .. '_us']
    if most > 0 then
      windows[n] = { limit = most, span_us = span_us, used = 0 }
      longest_us = math.max(longest_us, span_us)
    end
  end
  for _, bucket in ipairs(state) do
    local age_us = current - aligned(limit, bucket.start)
    if age_us < longest_us then
      buckets[#buckets + 1] = bucket
      for _, window in ipairs(windows) do
        if age_us < window.span_us then window.used = window.used + bucket.count end
      end
    end
  end
  return { current = current, windows = windows, longest_us = longest_us, buckets = buckets }
end

local function live(limit, state, now)
  local current = aligned(limit, now)
  if not state then return seen_at(limit, current, {}) end
  return seen_at(limit, math.max(current, aligned(limit, state[#state].start)), state)
end

-- What every window has left.
local function left(seen)
  local least = nil
  for _, window in ipairs(seen.windows) do
    local window_left = math.max(window.limit - window.used, 0)
    least = math.min(least or window_left, window_left)
  end
  return least
end

-- When `cost` fits all windows; NEVER if it never does.
local function fits_us(limit, seen, cost)
  local fits = seen.current
  for _, window in ipairs(seen.windows) do
    local room, used = window.limit - cost, window.used
    if room < 0 then return NEVER end
    for _, bucket in ipairs(seen.buckets) do
      if used <= room then break end
      local ends_us = end_us(limit, bucket, window.span_us)
      if ends_us > seen.current then
        used = used - bucket.count
        fits = math.max(fits, ends_us)
      end
    end
  end
  return fits
end

local function decision(limit, now, seen, retry_us)
  local remaining, shown = nil, nil
  for _, window in ipairs(seen.windows) do
    local window_left = math.max(window.limit - window.used, 0)
    if not remaining or window_left < remaining then
      remaining, shown = window_left, window.limit
    end
  end
  local last = seen.buckets[#seen.buckets]
  return {
    allowed = retry_us == 0,
    limit = shown,
    remaining = remaining,
    retry_after_us = retry_us,
    reset_after_us = last and end_us(limit, last, seen.longest_us) - now or 0,
  }
end

local function charged(limit, now, seen, charge)
  if charge == 0 then return decision(limit, now, seen, 0) end
  local buckets = seen.buckets
  local last = buckets[#buckets]
  if last and aligned(limit, last.start) >= seen.current then
    buckets[#buckets] = { start = last.start, count = last.count + charge }
  else
    buckets[#buckets + 1] = { start = seen.current, count = charge }
  end
  -- The current bucket is in every window.
  for _, window in ipairs(seen.windows) do window.used = window.used + charge end
  local ends_us = end_us(limit, buckets[#buckets], seen.longest_us)
  return decision(limit, now, seen, 0), 'put', buckets, ends_us
end

function bucketed_window.step(limit, state, now, cost)
  local seen = live(limit, state, now)
  if cost > left(seen) then
    local fits = fits_us(limit, seen, cost)
    return decision(limit, now, seen, fits == NEVER and NEVER or fits - now)
  end
  return charged(limit, now, seen, cost)
end

function bucketed_window.force(limit, state, now, cost)
  local seen = live(limit, state, now)
  return charged(limit, now, seen, math.min(cost, left(seen)))
end

-- Takes the cost off the newest buckets: a refund undoes what was charged last.
function bucketed_window.refund(limit, state, now, cost)
  local seen = live(limit, state, now)
  local buckets = seen.buckets
  if cost == 0 or #buckets == 0 then return decision(limit, now, seen, 0) end
  local owed = cost
  while owed > 0 and #buckets > 0 do
    local last = buckets[#buckets]
    local back = math.min(owed, last.count)
    owed = owed - back
    buckets[#buckets] = last.count > back and { start = last.start, count = last.count - back } or nil
  end
  -- Without its newest bucket the state may be of an earlier time.
  local newest = buckets[#buckets]
  local current = math.max(aligned(limit, now), newest and aligned(limit, newest.start) or 0)
  local after = seen_at(limit, current, buckets)
  local answer = decision(limit, now, after, 0)
  if not newest then return answer, 'remove' end
  return answer, 'put', buckets, end_us(limit, newest, after.longest_us)
end

-- The current bucket's count goes on beyond the limits, as far as the sum of all stays exact.
function bucketed_window.overcharge(limit, state, now, charge)
  local seen = live(limit, state, now)
  local all = 0
  for _, bucket in ipairs(seen.buckets) do all = all + bucket.count end
  charge = math.min(charge, MOST - all)
  return select(2, charged(limit, now, seen, charge))
end

return bucketed_window
