//! A TLS-only server answers clients that trust its authority.
#![cfg(all(unix, feature = "tls"))]
#![allow(clippy::expect_used, reason = "tests")]

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use ratelimit_servers::{FaultProxy, RedisServer, RespValue, TlsServer};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// The answer to a PING over TLS, with this name for the server.
fn ping(server: &TlsServer, port: u16, name: &str, certified: bool) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    let ca = CertificateDer::from_pem_slice(server.ca_pem().as_bytes()).expect("PEM");
    roots.add(ca).expect("an authority");
    let config = ClientConfig::builder().with_root_certificates(roots);
    let config = if certified {
        let client = CertificateDer::from_pem_slice(server.client_cert_pem().as_bytes());
        let key = PrivateKeyDer::from_pem_slice(server.client_key_pem().as_bytes());
        let key = key.expect("a key");
        config.with_client_auth_cert(vec![client.expect("a certificate")], key).expect("a pair")
    } else {
        config.with_no_client_auth()
    };
    let name = ServerName::try_from(name.to_owned()).expect("a name");
    let connection = ClientConnection::new(Arc::new(config), name).expect("a connection");
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut stream = StreamOwned::new(connection, stream);
    stream.write_all(b"PING\r\n")?;
    let mut reply = [0; 7];
    stream.read_exact(&mut reply)?;
    Ok(String::from_utf8_lossy(&reply).into_owned())
}

#[test]
fn only_clients_that_trust_the_authority_are_answered() {
    let mut server = RedisServer::start_tls().expect("a server with TLS");
    let port = server.port();
    assert_eq!(server.url(), format!("rediss://127.0.0.1:{port}"));
    for name in ["localhost", "127.0.0.1"] {
        assert_eq!(ping(&server, port, name, false).expect("answered"), "+PONG\r\n");
    }
    assert!(ping(&server, port, "example.org", false).is_err(), "the name is another");
    let stranger = RedisServer::start_tls().expect("another");
    assert!(ping(&stranger, port, "localhost", false).is_err(), "another authority");
    let mut clear = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
    clear.write_all(b"PING\r\n").expect("sent");
    let mut reply = Vec::new();
    let _ = clear.read_to_end(&mut reply);
    assert!(!reply.starts_with(b"+PONG"), "it speaks TLS only");
    assert_eq!(server.command(&["PING"]), Ok(RespValue::text("PONG")), "by the side door");
    server.restart().expect("again");
    assert_eq!(ping(&server, port, "localhost", false).expect("answered"), "+PONG\r\n");
}

#[test]
fn a_server_that_demands_client_certificates_accepts_its_own() {
    let binary = &RedisServer::binaries()[0];
    let args = ["--tls-auth-clients", "yes", "--requirepass", "secret"];
    let server = RedisServer::start_tls_with(binary, &args).expect("a server with TLS");
    let asked = ping(&server, server.port(), "localhost", true).expect("answered");
    assert_eq!(asked, "-NOAUTH", "as far as the password");
    assert!(ping(&server, server.port(), "localhost", false).is_err(), "no certificate");
    assert_eq!(server.command(&["PING"]), Ok(RespValue::text("PONG")));
}

#[test]
fn certificate_files_are_deleted_with_the_server() {
    let server = RedisServer::start_tls().expect("a server with TLS");
    let paths = [server.ca_path(), server.client_cert_path(), server.client_key_path()];
    let paths = paths.map(std::path::Path::to_owned);
    let pems = [server.ca_pem(), server.client_cert_pem(), server.client_key_pem()];
    for (path, pem) in paths.iter().zip(pems) {
        assert_eq!(fs::read_to_string(path).expect("a file"), pem);
    }
    let folder = paths[0].parent().expect("a folder").to_owned();
    drop(server);
    assert!(!folder.exists());
}

#[test]
fn tls_passes_through_a_proxy() {
    let server = RedisServer::start_tls().expect("a server with TLS");
    let proxy = FaultProxy::start(server.port()).expect("a proxy");
    let through = || ping(&server, proxy.port(), "localhost", false);
    assert_eq!(through().expect("answered"), "+PONG\r\n");
    proxy.refuse(true);
    assert!(through().is_err());
}
