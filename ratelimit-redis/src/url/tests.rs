use super::*;

fn parse(url: &str) -> RedisUrl {
    RedisUrl::parse(url).unwrap_or_else(|error| panic!("{url}: {error}"))
}

fn refused(url: &str) -> String {
    RedisUrl::parse(url).expect_err(url).to_string()
}

fn places(url: &RedisUrl) -> Vec<(&str, u16)> {
    url.places.iter().map(|(host, port)| (&**host, *port)).collect()
}

#[test]
fn one_server_has_a_place_a_login_and_a_database() {
    let url = parse("redis://us%40er:p%3Aw%2Fd@h:1/2?client=redis&mode=cas&protocol=resp3");
    assert!(url.kind == Kind::One);
    assert_eq!(places(&url), [("h", 1)]);
    assert_eq!(url.user.as_deref(), Some("us@er"));
    assert_eq!(url.password.as_deref(), Some("p:w/d"));
    assert_eq!((url.database, url.options.resp3, url.mode()), (2, true, Some("cas")));
    assert_eq!(url.client(), Some(Client::default()));

    let url = parse("valkey://[::1]");
    assert_eq!(places(&url), [("::1", 6_379)]);
    assert_eq!((url.database, url.options.resp3, url.mode(), url.client()), (0, false, None, None));
    assert_eq!((&url.user, &url.password, url.tls()), (&None, &None, None));
}

#[test]
fn a_login_is_a_user_a_password_or_both() {
    for (url, user, password) in [
        ("redis://:p@h", None, Some("p")),
        ("redis://u:@h", Some("u"), Some("")),
        ("redis://u:p:q@h", Some("u"), Some("p:q")),
        ("redis://u:p@q@h", Some("u"), Some("p@q")),
        ("redis://@h", None, None),
        ("redis://:@h", None, None),
    ] {
        let url = parse(url);
        assert_eq!((url.user.as_deref(), url.password.as_deref()), (user, password), "{url}");
    }
}

#[test]
fn sentinels_have_a_service_and_perhaps_a_login_of_their_own() {
    for (url, service, database) in [
        ("redis-sentinel://a,b:1", "mymaster", 0),
        ("redis-sentinel://a,b:1/", "mymaster", 0),
        ("redis-sentinel://a,b:1/7", "mymaster", 7),
        ("redis-sentinel://a,b:1/cache", "cache", 0),
        ("redis-sentinel://a,b:1/cache/7", "cache", 7),
        ("redis-sentinel://a,b:1/7?service=cache", "cache", 7),
        ("redis-sentinel://a,b:1?sentinelServiceName=cache", "cache", 0),
    ] {
        let url = parse(url);
        assert_eq!(places(&url), [("a", 26_379), ("b", 1)]);
        assert!(url.kind == Kind::Sentinels);
        assert_eq!((&*url.service, url.database), (service, database));
        assert_eq!((url.options.sentinel_user, url.options.sentinel_password), (None, None));
    }
    let url = parse("redis-sentinel://u:p@a?sentinel-user=su&sentinel-password=s%26p");
    let Options { sentinel_user, sentinel_password, .. } = &url.options;
    assert_eq!((sentinel_user.as_deref(), sentinel_password.as_deref()), (Some("su"), Some("s&p")));
    assert_eq!(url.user.as_deref(), Some("u"));
}

#[test]
fn a_cluster_has_several_places() {
    for url in ["redis-cluster://a:1,[::1]:2,c", "redis-cluster://u:p@a:1,[::1]:2,c/0"] {
        let url = parse(url);
        assert!(url.kind == Kind::Cluster);
        assert_eq!(places(&url), [("a", 1), ("::1", 2), ("c", 6_379)]);
    }
}

#[cfg(unix)]
#[test]
fn a_socket_has_a_path_and_a_login_before_it_or_in_options() {
    for (url, path, login, database) in [
        ("redis+unix:///run/redis.sock", "/run/redis.sock", (None, None), 0),
        ("redis+unix:///a%20b%3F?client=redis&db=3", "/a b?", (None, None), 3),
        ("redis+unix://u:p%2F@/s", "/s", (Some("u"), Some("p/")), 0),
        ("redis+unix://:p@/s?db=1", "/s", (None, Some("p")), 1),
        ("redis+unix:///s?pass=p%40&user=u", "/s", (Some("u"), Some("p@")), 0),
        ("redis+unix:///s?password=p", "/s", (None, Some("p")), 0),
    ] {
        let url = parse(url);
        assert!(url.kind == Kind::One);
        assert_eq!(places(&url), [(path, 0)]);
        assert_eq!((url.user.as_deref(), url.password.as_deref()), login, "{url}");
        assert_eq!(url.database, database, "{url}");
        assert!(!url.to_string().contains(['?', '@']), "{url}");
    }
}

#[cfg(feature = "tls")]
#[test]
fn an_encrypted_url_may_name_certificate_files() {
    assert_eq!(parse("rediss://h").tls(), Some(&TlsFiles::default()));
    for scheme in ["rediss", "rediss-sentinel", "rediss-cluster"] {
        let url = format!("{scheme}://h?tls-ca=/a/ca.pem&tls-cert=c%20d.pem&tls-key=k.pem");
        let files = TlsFiles {
            ca: Some("/a/ca.pem".into()),
            certificate: Some("c d.pem".into()),
            key: Some("k.pem".into()),
        };
        assert_eq!(parse(&url).tls(), Some(&files));
    }
    assert!(refused("rediss://h?tls-cert=a").contains("both tls-cert and tls-key"));
}

#[cfg(not(feature = "tls"))]
#[test]
fn an_encrypted_url_needs_the_tls_feature() {
    assert!(refused("rediss://h").contains("the feature tls"));
}

#[test]
fn an_invalid_url_is_refused_with_what_is_accepted() {
    for (url, says) in [
        ("redis://h:1?mode=x", "accepted are mode=lua, mode=cas and mode=multi"),
        ("redis://h:1?mode=cas&mode=lua", "mode is given twice"),
        ("redis://h:1?client=x", "accepted are client=redis and client=fred"),
        ("redis://h:1?merge=yes", "accepted are merge=on and merge=off"),
        ("redis://h:1?timeout=5", "the option timeout is not known"),
        ("redis://h:1?mode", "name=value"),
        ("redis://h:1?protocol=5", "protocol=resp3"),
        ("redis://h:1?tls-ca=x", "use rediss://"),
        ("redis://h:1?service=x", "redis-sentinel://"),
        ("redis-sentinel://h:1?service=", "service is empty"),
        ("redis-sentinel://h:1/a?service=b", "given twice"),
        ("redis-sentinel://h:1?sentinel-user=b", "give both"),
        ("redis-sentinel://h:1/a/b", "/SERVICE"),
        ("redis-cluster://h:1/1", "only database 0"),
        ("redis-cluster://h:1,/0", "redis-cluster://[user:password@]host[:port][,host[:port]…]"),
        ("redis://h:1,h:2", "redis://[user:password@]host[:port][/database]"),
        ("redis://user@h:1", "user:password@host"),
        ("redis://h:1/x", "redis://[user:password@]host"),
        ("redis://h:65536", "redis://[user:password@]host"),
        ("redis://[h]:1", "redis://[user:password@]host"),
        ("redis://", "redis://[user:password@]host"),
        ("memcached://h:1", "before :// is not known; accepted are redis://"),
        ("redis://h:1?pasword=x", "the option pasword is not known; accepted are client, mode"),
        ("redis://h:1?password=x", "stand before the host, user:password@host"),
        ("h:1", "accepted are redis://"),
        ("redis+unix://h/s", "redis+unix://[user:password@]/path/to/socket"),
        ("redis+unix://", "redis+unix://[user:password@]/path/to/socket"),
        ("redis+unix:///", "redis+unix://[user:password@]/path/to/socket"),
        ("redis+unix:///s?db=x", "number of a database"),
        ("redis+unix:///s?user=u", "give both"),
        ("redis+unix://u:p@/s?pass=q", "given twice"),
        ("redis+unix:///s?tls-ca=x", "use rediss://"),
        ("redis://h?db=1", "redis+unix://"),
    ] {
        let error = refused(url);
        assert!(error.contains(says), "{url} → {error}");
    }
}

#[test]
fn a_client_that_was_not_built_in_is_refused_with_the_remedy() {
    for (client, built) in [("redis", cfg!(feature = "redis")), ("fred", cfg!(feature = "fred"))] {
        match RedisUrl::parse(&format!("redis://h?client={client}")) {
            Ok(url) => assert!(built && url.client().is_some_and(|c| c.to_string() == client)),
            Err(error) => {
                assert!(!built);
                assert!(error.to_string().contains(&format!("the feature {client}")), "{error}");
            }
        }
    }
}

#[test]
fn no_user_and_no_password_is_ever_shown() {
    for (url, shown) in [
        ("redis://user:s3cret@h:1/2", "redis://h:1/2"),
        ("redis://:s3cret@h:1", "redis://h:1"),
        ("redis://s3cret@h:1", "redis://h:1"),
        ("redis://s3cret:@h:1", "redis://h:1"),
        ("redis://user:s3cret@h:1?mode=x", "redis://h:1"),
        ("redis://user:s3cret%FF@h:1", "redis://h:1"),
        ("redis://user:pa5 s3cret@h:1", "redis://h:1"),
        ("redis://user:s3cret@h:1,", "redis://***"),
        ("redis://user:s3cret@h:1:x", "redis://***"),
        ("redis://user:s3cret@", "redis://"),
        ("redis://user:s3c@ret@h:1", "redis://h:1"),
        ("redis://user:s3cret@[::1]:1?mode=cas", "redis://[::1]:1"),
        ("redis-cluster://user:s3cret@h:1,h:2", "redis-cluster://h:1,h:2"),
        ("redis-cluster://user:1,s3cret@h:1", "redis-cluster://h:1"),
        ("redis-cluster://user:s3cret@h:1,user:s3cret@h:2", "redis-cluster://"),
        ("redis-cluster://user:s3cret@h:1/1", "redis-cluster://h:1/1"),
        ("redis-sentinel://user:s3cret@h:1,[::1]:2/a/0", "redis-sentinel://h:1,[::1]:2/a/0"),
        ("redis-sentinel://h?sentinel-user=user&sentinel-password=s3cret", "redis-sentinel://h"),
        ("redis-sentinel://h:1?sentinel-password=s3cret@x", "redis-sentinel://***"),
        ("redis-sentinel://user:1/s3cret@h:1", "redis-sentinel://***"),
        ("redis-sentinel://user:1,x:s3cret", "redis-sentinel://***"),
        ("rediss://user:s3cret@h:1?tls-ca=x", "rediss://h:1"),
        ("redis://h?password=s3cret", "redis://h"),
        ("redis://h?user=user&password=s3cret", "redis://h"),
        ("redis://h?mode=s3cret", "redis://h"),
        ("redis://h?protocol=s3cret", "redis://h"),
        ("redis://h?client=s3cret", "redis://h"),
        ("redis-sentinel://h?sentinel-user=s3cret", "redis-sentinel://h"),
        ("redis+unix://user:s3cret@/s", "redis+unix:///s"),
        ("redis+unix:///s?user=user&pass=s3cret", "redis+unix:///s"),
        ("redis+unix:///s?db=s3cret", "redis+unix:///s"),
        ("redis+unix://user:s3c/ret@/s", "redis+unix://***"),
        ("redis+unix:///s@s3cret", "redis+unix://***"),
        ("redis+unix://user:s3cret", "redis+unix://***"),
        // Not a URL, or not the intended one.
        ("user:s3cret@h", "***"),
        ("s3cret://h:1", "***"),
        ("redis%3A%2F%2Fuser:s3cret@h:1", "***"),
        ("redis://user%3As3cret%40h:1", "redis://***"),
        ("redis://:s3cret", "redis://***"),
        ("redis://user:s3cret", "redis://***"),
        ("redis://user:s3cret%40127.0.0.1:1", "redis://***"),
        ("redis://user:1/s3cret@h:1", "redis://***"),
        ("redis://user:1?s3cret@h:1", "redis://***"),
        ("redis://user:1#s3cret@h:1", "redis://***"),
        ("redis://h:1?password=x@s3cret", "redis://***"),
    ] {
        let (said, debug) = match RedisUrl::parse(url) {
            Ok(url) => (url.to_string(), format!("{url:?}")),
            Err(error) => (error.to_string(), format!("{error:?}")),
        };
        for said in [said, debug] {
            assert!(!said.contains("s3c") && !said.contains("ret"), "{said}");
            assert!(!said.contains("user:s") && said.contains(shown), "{url}: {said}");
        }
    }
}
