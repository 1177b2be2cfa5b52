-- Acquires one check of a concurrency limit, with or without an id. concurrency.lua specifies the state;
-- README.md beside this file specifies what a script of one check receives and returns.

local key, reservation_key, cost = KEYS[1], KEYS[2], charge
local seen = call('HGET', key, field)
-- The driver handles an id that was used before.
if reservation_key and call('GET', reservation_key) then return '?' end
local at, used, live = now, 0, ''
if seen then
  local newest = match(seen, '^concurrency[ %d]* (%d+) %d+$')
  if not newest then return '?' end
  newest = newest + 0
  if newest > at then at = newest end
  -- Leases ascend by time: the ended ones come before the live ones.
  local past, before = at - lease_us, 0
  local length = #'concurrency'
  local live_from = length
  for timestamp_text, cost_text in string.gmatch(seen, ' (%d+) (%d+)') do
    local timestamp = timestamp_text + 0
    if timestamp < before or timestamp >= 2^52 or #cost_text > 15 then return '?' end
    before = timestamp
    length = length + 2 + #timestamp_text + #cost_text
    if timestamp > past then
      used = used + cost_text
    else
      live_from = length
    end
  end
  if length ~= #seen then return '?' end
  live = string.sub(seen, live_from + 1)
  if newest == at and used > 0 then
    -- Leases of one moment are one lease.
    local rest, newest_cost = match(live, '^(.*) %d+ (%d+)$')
    live, used, charge = rest, used - newest_cost, charge + newest_cost
  end
end
if used + charge > capacity then return time .. '\n0\n' .. #(seen or '') .. ':' .. (seen or '') end
local ttl_ms = ceil((at + lease_us - now) / 1000) + padding_ms
local short = call('PTTL', key) < ttl_ms
local done = redis.pcall('HSET', key, field, 'concurrency' .. live .. format(' %d %d', at, charge))
if type(done) == 'table' then return done end
local refused = false
if reservation_key then
  local reservation_ms = ceil((at + life_us - now) / 1000) + padding_ms
  local reservation = format('%d %d %d', at, at, cost)
  refused = redis.pcall('SET', reservation_key, reservation, 'PX', format('%d', reservation_ms)).err
end
if short and not refused then
  done = redis.pcall('PEXPIRE', key, format('%d', ttl_ms))
  refused = type(done) == 'table' and done.err
end
if refused then return redis.error_reply('RLPART ' .. (match(refused, '%u%u+ .*') or refused)) end
return time .. '\n1\n' .. #(seen or '') .. ':' .. (seen or '')
