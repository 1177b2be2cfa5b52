-- Decides almost all requests: any number of them, of any limits whose states are a few numbers.
-- The sections of the twins stand in it, without functions. README.md beside this file specifies
-- what a section receives and what it leaves; names that end in 0 are this script's own.
--
-- Requests of the same limits for the same keys are a group. A group is charged in order, first
-- come, first served, each request all or nothing: the script reads its states once, admits of each
-- run of equal costs as many as fit, and writes the states once. All requests of a call see the
-- same time, so n charges of a cost move a state as one charge of n times the cost does. The script
-- reads a group when its turn comes, so requests that share some of their states see each other's
-- charges.
--
--     KEYS: the keys of each group, each once; then those of records (premises.lua).
--     ARGV: the time (begin.lua); what is assumed about records, if anything is; and for one
--           request at one key
--           SHAPE FIELD… CHARGE… (CAPACITY NUMBER…)…
--           or parts, one for each set of limits, with an empty argument before each:
--           SHAPE KEYS NUMBERS SINGLE GROUPS [SPANS (KEY COUNT)…] FIELD… CHARGE…
--           (CAPACITY NUMBER…)… ([OWN] [RUNS (COUNT CHARGE…)…])…
--
-- SHAPE has a letter for each check, that of its algorithm; a capital, if denied requests are
-- charged too. A group has so many KEYS, and the limits so many NUMBERS, with their capacities. If
-- there are several keys, SPANS tells at which of them so many checks lie, one after the other. The
-- first SINGLE groups are one request each, at the CHARGEs behind the fields. Each of the others
-- has RUNS of requests: how many, and what each of them charges each limit. If NUMBERS is 0, each
-- group has its OWN, as each customer may: what a single request charges, and the capacities and
-- numbers, packed as states are, because a call may have a thousand of them.
--
-- Reading and setting a time to live in every decision would cost the server. So a state ends with
-- the moment until which its key lives, in milliseconds by the server's clock. A charge that ends
-- earlier leaves the time to live alone. Any other sets it a second later than needed; the state
-- says 10 ms less, because a server expires keys by a time that it has read a little earlier.
-- States are packed, seven bytes per number: parsing and formatting text costs as much as deciding.

--[[begin]]
--[[premises]]
local keys0, args0 = KEYS, ARGV
-- Tables have room for three checks: growing costs as much as reading a state.
local answers0, count0, key0 = { time0, '', '', '', '', '', '', '' }, 1, 0
-- Of a group: the states as read; the fields and states to write; and if it has several spans, of
-- each its key, where its fields end, how long the key has to live, and for how long it lives if
-- that is shorter.
local seen0, puts0, spans0 = { false, false, false }, { '', '', '', '', '', '' }, nil
-- Of runs: what each limit admits, and what is used of it. Most calls have none.
local capacity0, after0
-- Of groups with numbers of their own: how they are packed, and how many bytes that takes.
local own_format0, own_bytes0
while args0[first0] do
  local shape0, many0, size0, single0, groups0, field0 = args0[first0], 1, #args0, 1, 1, first0
  if shape0 == '' then
    shape0, many0, size0 = args0[first0 + 1], args0[first0 + 2] + 0, args0[first0 + 3] + 0
    single0, groups0, field0 = args0[first0 + 4] + 0, args0[first0 + 5] + 0, first0 + 5
  end
  local checks0, span_count0, span0 = #shape0, 1, first0 + 7
  if many0 > 1 then
    span_count0, spans0 = args0[first0 + 6] + 0, {}
    field0 = first0 + 6 + 2 * span_count0
  end
  local charge_single0 = field0 + checks0
  local limits0 = charge_single0 + checks0 + 1
  first0 = limits0 + size0
  if groups0 > 1 then
    -- Numbers are parsed once for all groups.
    for number0 = charge_single0 + 1, first0 - 1 do args0[number0] = args0[number0] + 0 end
  end
  local letters0 = { byte(shape0, 1, checks0) }
  for group0 = 1, groups0 do
    local answer0, charge0, runs0 = '?\n', charge_single0, nil
    local charges0, numbers0, first_number0 = args0, args0, limits0
    if size0 == 0 then
      local own0 = args0[first0]
      if #own0 ~= own_bytes0 then
        own_bytes0, own_format0 = #own0, '<' .. string.rep('I7', #own0 / 7)
      end
      numbers0, first_number0 = { unpack0(own_format0, own0) }, checks0 + 1
      charges0, charge0 = numbers0, 0
      first0 = first0 + 1
    end
    if group0 > single0 then
      charges0, charge0, runs0 = args0, first0 + 1, first0 + 1
      first0 = runs0 + args0[first0] * (1 + checks0)
      -- One request of another cost.
      if first0 - runs0 == 1 + checks0 and args0[runs0] + 0 == 1 then runs0 = nil end
    end
    repeat
      local admitted0, put0, tail0, unknown0 = 0, 0, 0, false
      local here0, due0, life0
      -- The first pass charges a request as if all its limits had room, or finds what is used
      -- before runs are charged. The second charges the attempts of a denied request, or what was
      -- admitted of the runs.
      for pass0 = 1, 2 do
        local fits0, last0, limit0 = true, 0, first_number0
        put0, tail0 = 0, count0 + 1
        for place0 = 1, 4 * span_count0, 4 do
          local next0 = last0 + 1
          here0, due0 = keys0[key0 + 1], 0
          if span_count0 == 1 then
            last0 = checks0
          else
            here0 = keys0[key0 + args0[span0 + (place0 - 1) / 2]]
            last0 = last0 + args0[span0 + (place0 + 1) / 2]
          end
          if pass0 == 2 then
            -- The states are known.
          elseif next0 == last0 then
            local found0 = pcall0('HGET', here0, args0[field0 + last0])
            if type(found0) == 'table' then unknown0 = true break end
            seen0[last0] = found0
          else
            local found0 = pcall0('HMGET', here0, unpack(args0, field0 + next0, field0 + last0))
            if found0.err then unknown0 = true break end
            for check0 = next0, last0 do seen0[check0] = found0[check0 - next0 + 1] end
          end
          for check0 = next0, last0 do
            local letter0, seen = letters0[check0], seen0[check0]
            local attempts0 = letter0 < 97
            if attempts0 then letter0 = letter0 + 32 end
            if not seen then answers0[tail0 + 1] = '0:' tail0 = tail0 + 1 end
            --[[each]]
            --[[if]] letter0 == --[[letter]] then
              local --[[parameters]] = --[[arguments]]
              limit0 = limit0 + --[[count]]
              --[[bounds_or_unknown]]
              local --[[state]]
              local kept0 = 0
              if seen then
                local name0
                if #seen == --[[bytes]] then name0, --[[state]], kept0 = unpack0('--[[format]]', seen) end
                if not (name0 == '--[[name]] ' and --[[valid]]) then unknown0 = true break end
                answers0[tail0 + 1], answers0[tail0 + 2] = '--[[bytes]]:', seen
                tail0 = tail0 + 2
              else
                --[[fresh]]
              end
              local charge = runs0 and 1 or charges0[charge0 + check0] + 0
              if charge > 0 then
                local at = now
                --[[level]]
                if runs0 and pass0 == 1 then
                  capacity0, after0 = capacity0 or {}, after0 or {}
                  capacity0[check0], after0[check0] = capacity, used
                elseif pass0 == 1 or runs0 or attempts0 then
                  local after, expires, gone = runs0 and after0[check0] or used + charge
                  local fills0 = pass0 == 2 and not runs0 and after > capacity
                  if fills0 then
                    --[[fill]]
                  elseif not runs0 and after > capacity then
                    fits0 = false
                  end
                  if fits0 and after ~= used then
                    --[[move]]
                    if fills0 then
                      --[[carry]]
                    end
                    --[[keep]]
                    if ttl0 and ttl0 > due0 then due0 = ttl0 end
                    puts0[put0 + 1] = args0[field0 + check0]
                    puts0[put0 + 2] = pack0('--[[format]]', '--[[name]] ', --[[state]], kept0)
                    put0 = put0 + 2
                  end
                end
              end
            --[[end]]
            end
          end
          if unknown0 then break end
          if span_count0 > 1 then
            spans0[place0], spans0[place0 + 1], spans0[place0 + 2], spans0[place0 + 3] = here0, put0, due0, false
          end
        end
        if unknown0 then break end
        if runs0 and pass0 == 1 then
          for run0 = runs0, first0 - 1, 1 + checks0 do
            local fit0 = args0[run0] + 0
            for check0 = 1, checks0 do
              local cost0 = args0[run0 + check0] + 0
              if cost0 > 0 then
                local room0 = floor((capacity0[check0] - after0[check0]) / cost0)
                if room0 < fit0 then fit0 = room0 end
              end
            end
            if fit0 > 0 then
              admitted0 = admitted0 + fit0
              for check0 = 1, checks0 do after0[check0] = after0[check0] + fit0 * args0[run0 + check0] end
            end
          end
          if admitted0 == 0 then break end
        elseif pass0 == 1 and fits0 then
          admitted0 = 1
          break
        elseif pass0 == 1 and not match(shape0, '%u') then
          put0 = 0
          break
        end
      end
      if unknown0 then break end
      local done, refused0, wrote0
      if put0 > 0 then
        -- How long a key has to live: as long as the longest of its fields matters, and never
        -- shorter than before, since another field may need it. Its life so far is known, and the
        -- user has to be allowed to extend it, before anything is written.
        for place0 = 1, 4 * span_count0, 4 do
          if span_count0 > 1 then here0, due0 = spans0[place0], spans0[place0 + 2] end
          if due0 > 0 then
            done = pcall0('PTTL', here0)
            if type(done) ~= 'table' and done < due0 then
              life0 = done
              if span_count0 > 1 then spans0[place0 + 3] = done end
              if may0 and not may0('PEXPIRE', here0, '1') then
                -- The server says why.
                done = pcall0('PEXPIRE', here0, '1')
              end
            end
            if type(done) == 'table' then refused0 = done break end
          end
        end
        local next0, last0 = 1, put0
        for place0 = 1, refused0 and 0 or 4 * span_count0, 4 do
          if span_count0 > 1 then
            here0, last0, due0, life0 = spans0[place0], spans0[place0 + 1], spans0[place0 + 2], spans0[place0 + 3]
          end
          if next0 < last0 then
            done = pcall0('HSET', here0, unpack(puts0, next0, last0))
            if type(done) == 'table' then refused0 = done break end
            wrote0 = true
            if life0 then
              done = pcall0('PEXPIRE', here0, format('%d', due0))
              if type(done) == 'table' then refused0 = done break end
              if not padding_ms then
                local key, fields, life_ms, ttl_ms = here0, (last0 - next0 + 1) / 2, life0, due0
                --[[sweep]]
              end
            end
            next0 = last0 + 1
          end
        end
      end
      if refused0 then
        -- What the server says, from the error's code on.
        if wrote0 then answer0 = '!' .. (match(refused0.err, '%u%u+ .*') or refused0.err) .. '\n' end
        break
      end
      answers0[count0 + 1] = admitted0 == 1 and '1\n' or admitted0 == 0 and '0\n' or admitted0 .. '\n'
      answer0, count0 = nil, tail0
    until true
    key0 = key0 + many0
    if answer0 then
      answers0[count0 + 1] = answer0
      count0 = count0 + 1
    end
  end
end
return table.concat(answers0, '', 1, count0)
