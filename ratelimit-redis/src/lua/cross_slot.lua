-- The cross-slot protocol: a batch whose keys lie in several slots runs one script per slot, in two waves.
-- cross_slot/lua.rs says when each of these operations is called:
--
--     ask      What an acquire would decide.
--     show     A peek that replies like 'ask'.
--     reserve  An acquire, with what 'undo' needs to take it back.
--     undo     Takes back what 'reserve' charged, because another slot denied.
--     attempt  An acquire of a batch that another slot has denied.
--
-- Each runs as an operation of a whole batch, and differs from it only in what this table says:
--
--     arguments      The names of its further numbers per check.
--     denied         Whether another slot has denied the batch.
--     asks           Whether each check is answered as if it was alone.
--     reserves       Whether the charge may be taken back.
--     read_and_step  Replaces the step of a check.
--     write          Runs with the writes of a check.
--     reply          Appends further numbers to the reply about a check.
local protocol = {}

-- Identifies where a charge went, so a refund takes it from there; -1 if the algorithm needs no mark.
local function mark(check, state)
  local of_state = check.algorithm.mark
  return of_state and state and of_state(state) or -1
end

-- Returns a reserved charge, or nothing if that might return another caller's charge.
local function take_back(check)
  local algorithm, limit, state = check.algorithm, check.limit, check.state
  if algorithm.settle then
    local reservation = { timestamp = check.at, since = check.at, cost = check.cost }
    return algorithm.settle(limit, state, now, reservation, 0)
  end
  if algorithm.undo then return algorithm.undo(limit, state, now, check.mark, check.cost) end
  if not algorithm.refund then return untouched(check, state) end
  local same = state and algorithm.mark and algorithm.mark(state) == check.mark
  return algorithm.refund(limit, state, now, same and check.cost or 0)
end

if operation == 'ask' or operation == 'show' then
  acquiring, operation = operation == 'ask', 'peek'
  protocol.asks = true

  -- The decision for the case that another check denies.
  function protocol.reply(answer, check, _, denied_wait_us)
    local decision = check.decision
    if denied_wait_us then
      decision.retry_after_us = denied_wait_us
    elseif decision.allowed then
      decision = untouched(check, check.state)
    end
    reply(answer, decision)
  end
elseif operation == 'reserve' then
  acquiring, operation = true, 'acquire'
  protocol.reserves = true

  -- Whether anything was written, the time at which the charge counts as made, its mark, and the wait if
  -- another slot denies.
  function protocol.reply(answer, check, written, denied_wait_us)
    answer[#answer + 1] = written and 1 or 0
    answer[#answer + 1] = check.at
    answer[#answer + 1] = mark(check, written and read(check))
    answer[#answer + 1] = denied_wait_us or check.shown.retry_after_us
  end
elseif operation == 'attempt' then
  acquiring, operation = true, 'acquire'
  protocol.denied = true
elseif operation == 'undo' then
  protocol.arguments = { 'at', 'mark' }

  function protocol.read_and_step(check)
    if check.reservation_key then
      local at = text(check.at)
      local own = at .. ' ' .. at .. ' ' .. check.cost_text .. group .. RESERVED
      reading = check.reservation_place
      check.is_others = redis.call('GET', check.reservation_key) ~= own
    end
    reading = check.place
    check.state = read(check)
    if check.is_others then
      check.decision = untouched(check, check.state)
    else
      check.decision, check.write, check.put, check.expires = take_back(check)
    end
  end

  function protocol.write(check)
    if check.reservation_key and not check.is_others then
      redis.call('DEL', check.reservation_key)
    end
  end

  -- Whether anything was given back.
  function protocol.reply(answer, check)
    answer[#answer + 1] = check.write and 1 or 0
  end
end
