-- Nothing was done under this fence. If it still holds the key, the key becomes free, or as an
-- earlier attempt left it, under a fence that no attempt holds. KEYS: the reservation. ARGV: fence.
local kept = redis.call('HMGET', KEYS[1], 'fence', 'status', 'attempt')
if kept[1] == ARGV[1] and not kept[2] then
    if tonumber(kept[3]) > 1 then
        redis.call('HSET', KEYS[1], 'attempt', kept[3] - 1, 'until', 0,
            'fence', string.format('%.0f', kept[1] + 1))
    else
        redis.call('DEL', KEYS[1])
        take_off(KEYS[1])
    end
end
