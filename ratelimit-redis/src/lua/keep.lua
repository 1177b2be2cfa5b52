-- Until when the key of a packed state is kept, and if its life so far does not suffice, as `ttl0`
-- how long it has to live. It has the state's `kept0`, and when it stops mattering in `expires`.

local ttl0
if padding_ms then
  -- The key lives by the server's clock, about which a given time says nothing.
  kept0, ttl0 = 0, ceil((expires - now) / 1000) + padding_ms
elseif kept0 * 1000 < expires then
  kept0 = ceil(expires / 1000) + 1000
  ttl0 = kept0 - floor(now / 1000)
  kept0 = kept0 - 10
end
