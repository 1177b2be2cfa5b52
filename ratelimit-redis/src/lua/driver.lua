-- Runs an operation on a batch, all or nothing. It reads and steps everything first and writes
-- last, so a script that fails has written nothing. What the decision means, `decide` in
-- ratelimit-core derives from what the script read. The sections of the twins stand in it; names
-- that end in 0 are this script's own.
--
--     KEYS: the keys of the batch, each once; then those of records (premises.lua).
--     ARGV: the time (begin.lua); what is assumed about records, if anything is; the operation
--           ('settle-once' for an id that was drawn for one charge); SHAPE; the caller's metadata;
--           with an id, the text that ends a reservation (its group; empty for one check). Then per
--           check: the field; the cost; with an id, the life of its reservation in µs; what 'adopt'
--           (the limit's number), 'heal' and 'undo' need besides; and the numbers of the limit:
--           CAPACITY NUMBER… UNIT for a state of a few numbers, otherwise NUMBER…. A stack of
--           limits is one check per limit.
--
-- SHAPE has six bytes for each check, two for each of three numbers: the place of its algorithm,
-- four times, 2 more if its caller is exempt, and 1 more if denied attempts are charged; the index
-- of its key; and the index of its reservation's key, 0 without an id.
--
-- A batch whose keys lie in several slots runs one script per slot. cross_slot/lua.rs says when
-- each of these is called:
--
--     ask      A peek that removes what no limit wrote, as an acquire does.
--     reserve  An acquire that may be taken back. Answers where each charge went, or '-'.
--     grow     An extension that may be taken back. Answers as 'reserve', with a colon and what the
--              reservation was before.
--     undo     Takes back what 'reserve' or 'grow' charged, given as they answered it. Answers 1 or
--              0 for each check.
--     attempt  An acquire of a batch that another slot has denied.
--
-- 'heal' sets each state to a full limit as of now if it still is as given. Answers 1 or 0 for each
-- check.
--
-- The reply is as that of decide.lua: the time; a line; and the states that the script read, then
-- the reservations under the id, each as its length, a colon and its bytes. The line begins with 1
-- if all checks admit, 0 if not, and = if the script only looked, or refused for what it read.
--
-- Or an error: RLCORRUPT or RLWRONGTYPE with the indices of check and key; RLPART and the server's
-- error, if something was written before it; or RLTIME with a time of the server at which nothing
-- is decided; or RLWINDOW with the index of a check and the time of the server, which lies in none
-- of the windows that the client named.

-- Raised when a key contains a value that no limit wrote.
local CORRUPT0 = {}

-- The check that is being decided: its number, algorithm, key, field and reservation's key; and the
-- index of the key that is being read, and whether that is its reservation. Whether a value that no
-- limit wrote is removed, so that the limit recovers and the error is reported once; whether
-- anything was written; and of a reset, the checks whose states cannot be read.
local check0, kind0, key0, field0, reservation_key0, reading0 = 0, nil, nil, nil, nil, nil
local is_reservation0, removes0, begun0, resets0, unread0 = false, false, false, false, nil

local function run0()
  --[[begin]]
  --[[premises]]
  -- The largest count and the last time.
  local MOST = 2 ^ 52 - 1
  -- How long a settled reservation whose id was drawn for one charge is remembered, in case that
  -- the settlement is sent again; `Reservation::REPEAT_US` in ratelimit-core.
  local REPEAT_US = 10000000
  -- Marks a reservation of one slot of several: the request that made it may take it back until
  -- another caller learns that the id has it.
  local RESERVED = ' ?'

  local keys0, args0, numbers0 = KEYS, ARGV, ARGV
  local operation, shape0, metadata0 = args0[first0], args0[first0 + 1], args0[first0 + 2]
  -- Whether the settled reservation is forgotten early: its id was drawn for one charge.
  local once = operation == 'settle-once'
  local grows, denied = operation == 'grow', operation == 'attempt'
  local reserves = grows or operation == 'reserve'
  removes0, resets0 = operation ~= 'peek', operation == 'reset'
  if operation == 'ask' then operation = 'peek' end
  if once then operation = 'settle' end
  if reserves or denied then operation = grows and 'extend' or 'acquire' end
  local looks, extends = operation == 'peek', operation == 'extend'
  local heals, undoes = operation == 'heal', operation == 'undo'
  local settling = extends or operation == 'settle' or operation == 'renew'
  local adopts, notes0 = operation == 'adopt', (reserves or undoes or heals) and {}
  local has_given = undoes or heals or adopts
  -- By algorithm, whether its charges can be reserved: 's', for leases 'l', otherwise '-'.
  local SETTLES = '--[[each]]--[[settles]]--[[end]]'

  -- The reply: the time, the line, the states, and the reservations. And the states by check, of an
  -- operation that compares them.
  local words0, word0, records0, seen0 = { time0, '', '', '', '', '' }, 2, '', heals and {}
  local function show0(state, size)
    words0[word0 + 1], words0[word0 + 2] = size, state
    word0 = word0 + 2
    if seen0 then seen0[check0] = state end
  end

  -- The commands that the batch has for the server. Those in `always0` are executed for a denied
  -- request too. Behind one with `due0`, its key has to live for so many milliseconds; if it is
  -- `surely0` more than before, nothing asks for how long that was.
  local commands0, last0, hash0, always0, due0, surely0 = {}, 0, nil, nil, nil, nil
  local attempts0
  local function command(...)
    last0 = last0 + 1
    commands0[last0] = { ... }
    if attempts0 then
      always0 = always0 or {}
      always0[last0] = true
    end
  end
  -- Writes a field of a hash, together with the fields before it. If its life so far does not
  -- suffice, the key has to live for so long.
  local function put0(key, field, stored, ttl)
    local fields = hash0 and commands0[hash0]
    if fields and fields[2] == key and (always0 and always0[hash0] or false) == attempts0 then
      local count = #fields
      fields[count + 1], fields[count + 2] = field, stored
    else
      command('HSET', key, field, stored)
      hash0 = last0
    end
    if ttl then
      due0 = due0 or {}
      if ttl > (due0[hash0] or 0) then due0[hash0] = ttl end
    end
  end
  -- Of a request with an id: parses the text of a reservation, writes one, and says when it ends.
  local parsed, difference, text_of_reservation, ends
  local group0 = byte(shape0, 5) + byte(shape0, 6) > 0 and args0[first0 + 3]
  if group0 then
    -- A cost may have 64 bits: Rust reads it. Here it is a number as `cost0` is.
    function parsed(stored)
      local timestamp, since, cost, counts, first, second, third, rest =
        match(stored, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)()')
      local settled, number, terms
      local function is_too_long(digits)
        return #digits > 20 or #digits == 20 and digits > '18446744073709551615'
      end
      if timestamp then
        number, counts, terms = math.min(cost + 0, 2 ^ 53 - 1), counts + 0, { first + 0, second + 0, third + 0 }
        if is_too_long(cost) or math.max(counts, terms[1], terms[2], terms[3]) >= 2 ^ 53 then error(CORRUPT0) end
      else
        timestamp, since, cost, settled, rest = match(stored, '^(%d+) (%d+) (%d+) (%d+)()')
        if not timestamp or is_too_long(cost) or is_too_long(settled) then error(CORRUPT0) end
      end
      timestamp, since = timestamp + 0, since + 0
      if timestamp > MOST or since > MOST then error(CORRUPT0) end
      local numbers, group = string.sub(stored, 1, rest - 1), string.sub(stored, rest)
      return {
        timestamp = timestamp, since = since, cost = number, cost_text = cost, settled = settled, counts = counts,
        terms = terms, numbers = numbers, group = group, reserved = false, leases = false,
      }
    end

    -- By how much one cost exceeds another, exact also between costs that are no exact numbers: an
    -- exempt caller may have reserved as much.
    function difference(cost, other)
      local function parts(digits) return '0' .. string.sub(digits, 1, -10), string.sub(digits, -9) end
      local high, low = parts(cost)
      local other_high, other_low = parts(other)
      local more = (high - other_high) * 1000000000 + (low - other_low)
      return math.min(math.max(more, 1 - 2 ^ 53), 2 ^ 53 - 1)
    end

    function text_of_reservation(timestamp, since, cost, settled, counts, terms, group)
      if settled then return format('%d %d %s %s%s', timestamp, since, cost, settled, group) end
      return format('%d %d %s %d %d %d %d%s', timestamp, since, cost, counts, terms[1], terms[2], terms[3], group)
    end

    -- A settled one that is forgotten early says so by a timestamp later than `since`.
    function ends(reservation, life_us)
      if reservation.settled and reservation.timestamp > reservation.since then return reservation.timestamp end
      return reservation.since + life_us
    end
  end

  -- What the reply begins with, and whether any check knows the id.
  local line, known, lease_has_ended = looks and '=' or denied and '0' or '1', not settling, false
  -- The reservation of the new id of the check before: its key, time and terms.
  local latest_key0, latest_at0, latest_terms0
  -- What remains by limit, of the twins of a stack the least, for what is adopted.
  local left0 = adopts and {}

  local first_pass = (heals or adopts) and 1 or 2
  for pass0 = first_pass, 2 do
    local next0 = first0 + (group0 and 4 or 3)
    local shows0 = pass0 == first_pass
    for number0 = 1, #shape0 / 6 do
      check0 = number0
      local kind_high, kind_low, key_high, key_low, id_high, id_low = byte(shape0, 6 * number0 - 5, 6 * number0)
      local place0, reservation_place0 = key_high * 256 + key_low, id_high * 256 + id_low
      attempts0 = kind_low % 2 == 1
      local exempt0 = kind_low % 4 >= 2
      kind0 = (kind_high * 256 + kind_low - kind_low % 4) / 4
      local cost_text0, life_us0, given0 = args0[next0 + 1], nil, nil
      field0, next0 = args0[next0], next0 + 2
      if group0 then life_us0, next0 = args0[next0] + 0, next0 + 1 end
      if has_given then given0, next0 = args0[next0], next0 + 1 end
      local limit0 = next0
      -- Costs are compared as text, because the largest have no exact number. Calculations use a
      -- number.
      local cost0 = math.min(cost_text0 + 0, 2 ^ 53 - 1)
      key0, reservation_key0 = keys0[place0], group0 and keys0[reservation_place0]
      -- What the twin does, at which cost; when the charge was made that it changes, and as which
      -- reservation.
      local act0, charge0, made, reservation = 'acquire', cost0, nil, nil
      local stored_reservation0, status0, before_growth0 = nil, settling and 'unknown' or nil, nil
      if reservation_key0 then
        reading0, is_reservation0 = reservation_place0, true
        local stored = call('GET', reservation_key0)
        if shows0 then records0 = records0 .. (stored and #stored .. ':' .. stored or '0:') end
        local found = stored and parsed(stored)
        if found then
          local other = found.group ~= group0
          if other and string.sub(found.group, -#RESERVED) == RESERVED then
            found.group, found.reserved = string.sub(found.group, 1, -#RESERVED - 1), true
            other = found.group ~= group0
          end
          if other and found.group ~= '' and not match(found.group, '^ @' .. string.rep('%x', 16) .. ' [%w%-_.,]+$') then
            error(CORRUPT0)
          end
          if now < ends(found, life_us0) then stored_reservation0 = found end
        end
        found = stored_reservation0
        if found and not undoes then
          if found.group ~= group0 then
            status0 = 'refused'
          elseif found.settled then
            -- The same request again is how a client asks for a lost reply.
            local same = found.settled == cost_text0 and operation ~= 'acquire' and operation ~= 'renew' and not extends
            status0 = same and 'done' or 'refused'
          elseif settling then
            status0 = 'live'
          else
            status0 = (operation == 'acquire' or looks) and found.cost_text == cost_text0 and 'done' or 'refused'
          end
        end
      end
      if status0 == 'live' then
        local settles = string.sub(SETTLES, kind0 + 1, kind0 + 1)
        reservation = stored_reservation0
        local more = difference(cost_text0, reservation.cost_text)
        if extends then
          charge0 = more > 0 and more or 0
          if more > 0 then before_growth0, act0 = string.gsub(reservation.numbers, ' ', ','), 'extend' end
          if more > 0 and settles == 'l' then status0 = 'refused' end
          reservation.reserved, reservation.leases = grows and more > 0, settles == 'l'
        elseif settles == 'l' then
          act0, charge0, made = operation, reservation.cost, reservation.timestamp
        elseif operation == 'renew' then
          charge0 = 0
        elseif settles == '-' then
          status0 = 'refused'
        elseif more >= 0 then
          act0, charge0 = 'force', more
        else
          act0, charge0, made = 'give', math.min(-more, reservation.counts), reservation.timestamp
        end
      elseif status0 == 'unknown' then
        -- If one lease of the batch has ended, another caller may have its place: the renewal is
        -- refused even if the other checks still hold theirs.
        if operation == 'renew' and string.sub(SETTLES, kind0 + 1, kind0 + 1) == 'l' then lease_has_ended = true end
      elseif undoes then
        local own, numbers = not reservation_key0, nil
        local found = stored_reservation0
        if found and found.reserved and found.cost_text == cost_text0 and found.group == group0 then own = true end
        act0 = own and 'undo' or nil
        made, numbers = match(given0, '^(%d+):?([%d,]*)$')
        made = made + 0
        if own and numbers ~= '' then
          before_growth0 = parsed((string.gsub(numbers, ',', ' ')))
          before_growth0.group = found.group
          charge0 = difference(cost_text0, before_growth0.cost_text)
        end
      elseif heals or adopts then
        if pass0 == 1 then
          act0, charge0 = nil, heals and cost0 or 0
        elseif heals then
          act0 = seen0[check0] == given0 and 'full' or nil
        else
          act0, charge0 = 'force', math.max(0, left0[given0] - cost0)
        end
      elseif operation == 'reset' then
        act0 = 'remove'
      elseif operation == 'force' then
        act0 = 'force'
      elseif operation == 'refund' then
        act0 = 'give'
      end
      if exempt0 and (act0 == 'acquire' or act0 == 'extend' or operation == 'force' or operation == 'settle' and act0 == 'force') then
        -- What it does not charge stays out of a reservation.
        act0, charge0, before_growth0 = 'acquire', 0, nil
        if reservation then reservation.reserved = false end
      elseif exempt0 and undoes then
        charge0 = 0
      end
      if status0 == 'refused' then line = '=' end
      if status0 ~= 'unknown' then known = true end
      if status0 and status0 ~= 'live' then act0 = nil end
      -- What the twin leaves: whether the charge fits; 'put' or 'remove' if it changes the state;
      -- when a charge counts as made, and where it went; and what the record keeps of it.
      local fits0, wrote0, at0, mark0, terms0, counts0 = true, nil, now, nil, nil, nil
      reading0, is_reservation0 = place0, false
      --[[each]]
      --[[if]] kind0 == --[[place]] then
        local --[[parameters]] = --[[arguments]]
        limit0 = limit0 + --[[count]]
        --[[bounds_or_error]]
        next0 = limit0 + --[[units]]
        local gone0 = act0 == 'remove'
        if gone0 and (not group0 or unread0 and unread0[check0]) then
          -- It does not have to understand the state.
          call(--[[reading]])
          show0('', '0:')
        else
          -- The record of a reset is as old as the state.
          if gone0 then act0, charge0 = 'acquire', 0 end
          --[[twin]]
        end
        if gone0 then
          command(--[[removing]])
          wrote0 = 'remove'
        end
      --[[end]]
      end
      if not fits0 and not looks then line = line == '=' and line or '0' end
      local new0, stored0, ended0
      if not reservation_key0 or pass0 == 1 then
        -- Nothing is recorded.
      elseif status0 == 'done' then
        if stored_reservation0.reserved then
          -- From now on a caller relies on it.
          stored_reservation0.reserved, new0 = false, stored_reservation0
        end
      elseif status0 == 'live' then
        new0 = reservation
        if operation == 'settle' then
          if once then
            local forgotten = math.min(now + REPEAT_US, ends(new0, life_us0), MOST)
            new0.timestamp, new0.since = forgotten, now
          end
          new0.settled = cost_text0
        elseif extends then
          if before_growth0 then new0.cost_text, new0.counts = cost_text0, (counts0 or new0.counts) + charge0 end
          if counts0 then new0.timestamp, new0.terms = at0, terms0 or new0.terms end
          -- A lease is moved to live longer.
          if not new0.leases then new0.since = math.max(at0, new0.since) end
        else
          -- A charge that did not move only lives longer.
          if wrote0 == 'put' then new0.timestamp = at0 end
          new0.since, new0.reserved = math.max(at0, new0.since), false
        end
      elseif undoes then
        if exempt0 and act0 then wrote0 = 'put' end
        if wrote0 then
          new0 = before_growth0
          if not new0 then command('DEL', reservation_key0) end
        end
      elseif not status0 and not looks then
        if reservation_key0 == latest_key0 then
          -- The limits of a stack share a reservation, which counts as made at the latest of their
          -- times.
          latest_at0 = math.max(latest_at0, at0)
        else
          latest_key0, latest_at0, latest_terms0 = reservation_key0, at0, terms0 or { 0, 0, 0 }
        end
        -- An acquired charge awaits its settlement; every other operation settles at once.
        local settled = operation ~= 'acquire' and cost_text0
        ended0 = latest_at0 + life_us0
        stored0 = text_of_reservation(latest_at0, latest_at0, cost_text0, settled, exempt0 and 0 or cost0, latest_terms0,
          reserves and not settled and group0 .. RESERVED or group0)
      end
      if new0 then
        ended0 = ends(new0, life_us0)
        stored0 = text_of_reservation(new0.timestamp, new0.since, new0.cost_text, new0.settled, new0.counts, new0.terms,
          new0.reserved and not new0.settled and new0.group .. RESERVED or new0.group)
      end
      if stored0 then
        -- It lives longer at a given time, by the padding.
        local life_ms = math.max(ceil((ended0 - now) / 1000), 1) + (padding_ms or 0)
        command('SET', reservation_key0, stored0, 'PX', format('%d', life_ms))
      end
      if notes0 then
        local note = '-'
        if undoes or heals then
          note = wrote0 and '1' or '0'
        elseif (wrote0 or exempt0 and stored0 and not status0) and (before_growth0 or not status0) then
          note = format('%d', mark0 or at0) .. (before_growth0 and ':' .. before_growth0 or '')
        end
        notes0[check0] = { note, attempts0 }
      end
    end
  end
  if not known or lease_has_ended then line = '=' end
  local begins = line

  if line ~= '=' then
    local life0, extended0 = due0 and {}, {}
    -- How long a key lives so far is known, and the user has to be allowed to extend it, before
    -- anything is written: a key never lives for ever.
    for n, due in pairs(due0 or {}) do
      if line == '1' or always0 and always0[n] then
        local key = commands0[n][2]
        if not (surely0 and surely0[n]) then life0[n] = call('PTTL', key) end
        if (not life0[n] or life0[n] < due) and may0 and not may0('PEXPIRE', key, '1') then
          -- The server says why.
          call('PEXPIRE', key, '1')
        end
      end
    end
    for n = 1, last0 do
      if line == '1' or always0 and always0[n] then
        local it, due = commands0[n], due0 and due0[n]
        call(unpack(it))
        begun0 = true
        if due then
          -- A log without its last entry was gone in between.
          if it[1] ~= 'HSET' and life0[n] then life0[n] = call('PTTL', it[2]) end
          -- Another command of the batch may have extended the life of the same key.
          if extended0[it[2]] then life0[n] = math.max(life0[n] or 0, extended0[it[2]]) end
          if not life0[n] or life0[n] < due then
            call('PEXPIRE', it[2], format('%d', due))
            extended0[it[2]] = due
            if it[1] == 'HSET' and not padding_ms then
              local key, fields, life_ms, ttl_ms = it[2], (#it - 2) / 2, life0[n], due
              --[[sweep]]
            end
          end
        end
      end
    end
  end

  if notes0 then
    for place = 1, check0 do
      local note = notes0[place]
      line = line .. ' ' .. ((begins == '1' or begins == '0' and note[2]) and note[1] or '-')
    end
  end
  words0[2], words0[word0 + 1] = line .. '\n', records0
  return table.concat(words0, '', 1, word0 + 1)
end

local done, problem = pcall(run0)
while problem == CORRUPT0 and resets0 and not is_reservation0 do
  unread0 = unread0 or {}
  unread0[check0] = true
  done, problem = pcall(run0)
end
if done then return problem end
if problem == CORRUPT0 then
  if removes0 and is_reservation0 then
    redis.call('DEL', reservation_key0)
  elseif removes0 then
    --[[each]]
    --[[if]] kind0 == --[[place]] then
      redis.call(--[[removing]])
    --[[end]]
    end
  end
  return redis.error_reply('RLCORRUPT ' .. check0 .. ' ' .. reading0)
end
-- The server's own error, such as WRONGTYPE: with its code in front, as outside of a pcall.
local message = type(problem) == 'table' and problem.err or tostring(problem)
message = string.match(message, '%u%u+ .*') or 'ERR ' .. message
if begun0 then
  -- If the server refuses a command after others, for example one that the user may not call, the
  -- earlier writes remain.
  message = 'RLPART ' .. message
elseif string.match(message, '^WRONGTYPE') then
  message = 'RLWRONGTYPE ' .. check0 .. ' ' .. reading0
end
return redis.error_reply(message)
