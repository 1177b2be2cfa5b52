-- The lockout: a count per window, which begins with the first charge. The charge that reaches the
-- count blocks the key for a while, and for longer each time.
--
-- The state is the start of the window, the cost charged in it, the time of the newest charge, the
-- number of lockouts, the end of the block (0 without one), and when all is forgotten. The Rust
-- twin is lockout.rs in ratelimit-core. README.md beside this file specifies what each section
-- receives and what it leaves.

--- fresh
start, count, newest, lockouts, until_us, ends_us = now, 0, now, 0, 0, now

--- full
-- As one that has been blocked so often that the next block is the longest.
lockouts, ends_us = -1, now + 1

--- valid
start < 2^52 and newest < 2^52

--- level
-- The length of the block of this number.
local function length_us(nth)
  local us, further = block_us, factor > 1 and nth or 1
  while further > 1 and us < longest_us do
    us, further = us > floor(longest_us / factor) and longest_us or us * factor, further - 1
  end
  return us
end
-- When all is forgotten: with the window, or once the blocks are.
local function forgotten_us()
  local window = until_us == 0 and count > 0 and start + window_us or 0
  if lockouts == 0 then return window end
  return math.max(window, math.max(newest, until_us) + forget_us)
end
local written_us, blocked_us, foreign, outlasts = ends_us, until_us, nil, false
-- A key that is filled may be remembered for longer by its window.
local blocks = lockouts >= 0 or longest_us + forget_us >= window_us
if lockouts < 0 then lockouts = 64 end
-- A block and what is remembered of it last no longer than by this limit, nor than by the one that
-- wrote the state.
if until_us > 0 then until_us = math.min(until_us, newest + length_us(lockouts)) end
ends_us = math.min(ends_us, forgotten_us())
outlasts = ends_us < written_us and now < written_us
if now < ends_us and now < until_us then
  if count < capacity then count = capacity end
else
  -- This limit counts a block of another one as over.
  if now < blocked_us and now < written_us then foreign = { start, count, newest, lockouts } end
  if now >= ends_us then
    start, count, newest, lockouts, ends_us = now, 0, now, 0, now
  elseif until_us > 0 or count == 0 or now >= start + window_us then
    start, count = math.max(now, newest), 0
  end
  until_us = 0
end
local used = count

--- move
count = after
if after > used then
  newest = math.max(now, newest)
  if after >= capacity then
    lockouts = math.min(lockouts + 1, 64)
    if blocks then until_us = newest + length_us(lockouts) end
  end
  ends_us = forgotten_us()
elseif until_us > 0 then
  -- The charge that is taken back leaves no block.
  lockouts, until_us = math.max(lockouts - 1, 0), 0
  ends_us = forgotten_us()
else
  ends_us = count > 0 and written_us or math.min(written_us, forgotten_us())
end
expires = ends_us

--- mark
start

--- give
-- A charge of a past window no longer counts. Nothing is refunded of a block.
if made and made ~= start or not made and until_us > 0 then charge = 0 end

--- carry
-- Another limit may still block, or remember for longer.
if after > used and foreign then
  start, count, newest, lockouts = unpack(foreign)
  until_us, ends_us, expires = blocked_us, written_us, written_us
elseif after > used and outlasts then
  ends_us = math.max(ends_us, written_us)
  expires = ends_us
end
gone = count == 0 and lockouts == 0 or ends_us <= now
