-- Decides a batch, all or nothing: the Lua twin of `decide` in ratelimit-core.
--
-- KEYS: the keys of the batch, each once.
-- ARGV: operation, time in µs or '' for the server's, padding in ms; then, for each check,
--       algorithm, position in KEYS, field, cost, and the algorithm's parameters.
-- Answers five integers a check: allowed (0 or 1), the limit (-1 for the algorithm's capacity),
-- remaining, retry after (µs, -1 for never), reset after (µs). Reads and steps everything first and writes last: a script that fails has written
-- nothing.

local operation, now, padding_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

local checks, next_arg = {}, 4
while ARGV[next_arg] do
  local algorithm = algorithms[ARGV[next_arg]]
  local check = {
    algorithm = algorithm,
    key = KEYS[tonumber(ARGV[next_arg + 1])],
    field = ARGV[next_arg + 2],
    cost = tonumber(ARGV[next_arg + 3]),
    limit = {},
  }
  next_arg = next_arg + 4
  for _, name in ipairs(algorithm.parameters) do
    check.limit[name] = tonumber(ARGV[next_arg])
    next_arg = next_arg + 1
  end
  checks[#checks + 1] = check
end

-- Reading and stepping write nothing. Where they meet what nobody of ours wrote, that is removed, so
-- that the limit heals, and the caller is told, once.
local function read_and_step(check)
  local algorithm, cost = check.algorithm, check.cost
  if operation == 'reset' then
    check.decision = algorithm.step(check.limit, nil, now, 0)
    check.write = 'remove'
    return
  end
  check.state = algorithm.read(check.key, check.field)
  local step = algorithm[operation] or algorithm.step
  check.decision, check.write, check.put, check.expires = step(check.limit, check.state, now, cost)
end

local all_allowed = true
for position, check in ipairs(checks) do
  local done, problem = pcall(read_and_step, check)
  if problem == CORRUPT then
    check.algorithm.remove(check.key, check.field)
    return redis.error_reply('RLCORRUPT ' .. position)
  end
  if not done then
    -- The server's own error, such as WRONGTYPE: with its code in front, as outside of a pcall.
    local told = type(problem) == 'table' and problem.err or tostring(problem)
    return redis.error_reply(string.match(told, '%u%u+ .*') or 'ERR ' .. told)
  end
  all_allowed = all_allowed and check.decision.allowed
end

-- Write, or else let those that would have admitted show what they have, uncharged.
local answer = {}
for _, check in ipairs(checks) do
  local decision = check.decision
  if not all_allowed then
    if decision.allowed and #checks > 1 then
      decision = check.algorithm.step(check.limit, check.state, now, 0)
    end
  elseif operation ~= 'peek' then
    if check.write == 'put' then
      local ttl_ms = math.max(ceil_div(math.max(check.expires - now, 0), 1000), 1) + padding_ms
      check.algorithm.put(check.key, check.field, check.put, ttl_ms)
    elseif check.write == 'remove' then
      check.algorithm.remove(check.key, check.field)
    end
  end
  answer[#answer + 1] = decision.allowed and 1 or 0
  answer[#answer + 1] = decision.limit or -1
  answer[#answer + 1] = decision.remaining
  answer[#answer + 1] = decision.retry_after_us
  answer[#answer + 1] = decision.reset_after_us
end
return answer
