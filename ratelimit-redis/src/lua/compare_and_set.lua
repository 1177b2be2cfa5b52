-- Writes several keys if none of them has changed since they were read, for algorithms that are
-- stepped in Rust.
--
-- KEYS: the keys, each once; then, if the answer is to be remembered, what remembers it.
-- ARGV: for how many ms the answer is remembered, or '0'; then for each key: '1' and the value that was
--       read, or '0' and anything for none; and what becomes of it: '', or 'put', the value and its time
--       to live in ms, or 'remove'; always five.
-- Answers 1, or 0 if a key has changed and nothing was written.

local remembered_ms = tonumber(ARGV[1])
local count = remembered_ms > 0 and #KEYS - 1 or #KEYS
-- A client that may send a request again is given the first answer again.
if remembered_ms > 0 and redis.call('EXISTS', KEYS[#KEYS]) == 1 then return 1 end

for i = 1, count do
  local found = redis.call('GET', KEYS[i])
  local read = ARGV[5 * i - 3] == '1' and ARGV[5 * i - 2]
  if found ~= read then return 0 end
end
for i = 1, count do
  local change = ARGV[5 * i - 1]
  if change == 'put' then
    redis.call('SET', KEYS[i], ARGV[5 * i], 'PX', ARGV[5 * i + 1])
  elseif change == 'remove' then
    redis.call('DEL', KEYS[i])
  end
end
if remembered_ms > 0 then redis.call('SET', KEYS[#KEYS], '1', 'PX', ARGV[1]) end
return 1
