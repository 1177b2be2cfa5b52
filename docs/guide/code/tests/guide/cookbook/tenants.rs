use ratelimit_core::{AnyAlgorithm, ConfigError, Gcra, Limits, RateLimiter, Verdict};
use ratelimit_redis::{CrossSlot, RedisError, RedisStore, Tag};

fn limits() -> Result<Limits<AnyAlgorithm>, ConfigError> {
    Limits::builder()
        .limit("tenant", Gcra::per_second(100))
        .by(["tenant"])
        .limit("user", Gcra::per_second(10))
        .by(["user"])
        .build()
}

async fn connect(url: &str) -> Result<RedisStore, RedisError> {
    let by_tenant = RedisStore::builder().tag(Tag::UpTo('/')); // {acme}/alice
    by_tenant.cross_slot(CrossSlot::Refuse).connect(url).await // an error, not two waves
}

async fn check(
    limiter: &RateLimiter<RedisStore>,
    tenant: &str,
    user: &str,
) -> Result<Verdict, RedisError> {
    let user = format!("{tenant}/{user}");
    limiter.check(&[("tenant", tenant), ("user", &user)]).await
}

mod tests {
    use ratelimit_servers::RedisCluster;

    use super::*;
    use crate::Error;

    #[tokio::test]
    async fn a_tenant_and_its_users_are_one_script() -> Result<(), Error> {
        let cluster = RedisCluster::shared()?;
        let limiter = RateLimiter::new(limits()?, connect(&cluster.url()).await?);
        for tenant in ["acme", "globex", "initech", "umbrella"] {
            for user in ["alice", "bob", "carol"] {
                let verdict = check(&limiter, tenant, user).await?;
                assert_eq!((verdict.decisions().len(), verdict.remaining()), (2, 9));
            }
        }
        // Where users lie apart from their tenant, the batch is refused.
        let apart =
            ["alice", "bob", "carol", "dave"].map(|user| [("tenant", "acme"), ("user", user)]);
        let mut refused = 0;
        for caller in apart {
            refused += u32::from(limiter.check(&caller).await.is_err());
        }
        assert_eq!(refused, 4);
        Ok(())
    }
}
