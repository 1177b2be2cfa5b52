//! [`TlsServer`]: a server that speaks TLS.

use std::ops::Deref;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, Error, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, date_time_ymd,
};

use crate::keeper::Recipe;
use crate::port::Port;
use crate::{RedisServer, on_free_ports};

/// A server that speaks TLS to its clients, with certificates that are generated for it and deleted
/// with it.
///
/// In all other respects it is a [`RedisServer`]. Its URL begins with `rediss://`.
/// [`command`](RedisServer::command) uses another port, without TLS. The certificate is for
/// `localhost` and `127.0.0.1`.
#[derive(Debug)]
pub struct TlsServer {
    server: RedisServer,
    /// The certificates of the authority and of the client, and the client's key.
    files: [PathBuf; 3],
}

const CA_FILE: &str = "ca.crt";
const SERVER_FILE: &str = "server.crt";
const EXPIRED_FILE: &str = "expired.crt";
const CLIENT_FILE: &str = "client.crt";
const CLIENT_KEY_FILE: &str = "client.key";

impl RedisServer {
    /// Starts a server that speaks TLS only and demands no client certificate.
    ///
    /// # Errors
    /// The server did not start; the text gives the reason and the remedy.
    pub fn start_tls() -> Result<TlsServer, String> {
        Self::start_tls_with(&Self::binaries()[0], &[])
    }

    /// Starts a server that speaks TLS only with additional arguments, such as
    /// `["--tls-auth-clients", "yes"]`, which demands a certificate of every client.
    ///
    /// # Errors
    /// The server did not start; the text gives the reason and the remedy. The binary may have been
    /// built without TLS.
    pub fn start_tls_with(binary: &str, args: &[&str]) -> Result<TlsServer, String> {
        let pems = certificates().map_err(|error| format!("no certificates: {error}"))?;
        let server = on_free_ports(|| {
            let (port, side_door) = (Port::claim()?, Port::claim()?);
            let number = port.number().to_string();
            let mut tls_args = vec!["--tls-port", &number, "--tls-auth-clients", "no"];
            tls_args.extend(["--tls-ca-cert-file", CA_FILE]);
            // Relative to the server's own directory.
            tls_args.extend(["--tls-cert-file", SERVER_FILE, "--tls-key-file", "server.key"]);
            tls_args.extend(args);
            let mut recipe = Recipe::of_a_server(side_door.number(), binary, &tls_args);
            recipe.files.clone_from(&pems);
            Self::start_recipe(recipe, args, port, Some(side_door))
        })?;
        let directory = &server.recipe.directory;
        let files = [CA_FILE, CLIENT_FILE, CLIENT_KEY_FILE].map(|name| directory.join(name));
        Ok(TlsServer { server, files })
    }
}

impl TlsServer {
    /// Gives the server a certificate that has expired. Open connections stay; each new one meets
    /// it.
    ///
    /// # Errors
    /// The server does not answer or refuses.
    pub fn expire(&self) -> Result<(), String> {
        self.command(&["CONFIG", "SET", "tls-cert-file", EXPIRED_FILE])?.ok().map(drop)
    }

    /// Gives the server its first certificate again.
    ///
    /// # Errors
    /// As [`expire`](Self::expire).
    pub fn renew(&self) -> Result<(), String> {
        self.command(&["CONFIG", "SET", "tls-cert-file", SERVER_FILE])?.ok().map(drop)
    }

    /// The certificate of the authority that signed the server's: clients must trust it. A PEM
    /// file, as are the others, that lasts as long as the server.
    pub fn ca_path(&self) -> &Path {
        &self.files[0]
    }

    /// A client's certificate, signed by the same authority.
    pub fn client_cert_path(&self) -> &Path {
        &self.files[1]
    }

    /// The private key of [`client_cert_path`](Self::client_cert_path).
    pub fn client_key_path(&self) -> &Path {
        &self.files[2]
    }
}

impl Deref for TlsServer {
    type Target = RedisServer;

    fn deref(&self) -> &RedisServer {
        &self.server
    }
}

/// The names and contents of the files in a server's directory.
type Pems = Vec<(&'static str, String)>;

/// An authority, and what it has signed.
fn certificates() -> Result<Pems, Error> {
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.distinguished_name.push(DnType::CommonName, "ratelimit-testkit");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate()?;
    let ca = authority.self_signed(&key)?.pem();
    let issuer = Issuer::new(authority, key);
    let server =
        certificate_params(ExtendedKeyUsagePurpose::ServerAuth, &["localhost", "127.0.0.1"])?;
    let client = certificate_params(ExtendedKeyUsagePurpose::ClientAuth, &[])?;
    let (server_key, client_key) = (KeyPair::generate()?, KeyPair::generate()?);
    let mut expired = server.clone();
    expired.not_before = date_time_ymd(2000, 1, 1);
    expired.not_after = date_time_ymd(2001, 1, 1);
    Ok(vec![
        (CA_FILE, ca),
        (SERVER_FILE, server.signed_by(&server_key, &issuer)?.pem()),
        (EXPIRED_FILE, expired.signed_by(&server_key, &issuer)?.pem()),
        ("server.key", server_key.serialize_pem()),
        (CLIENT_FILE, client.signed_by(&client_key, &issuer)?.pem()),
        (CLIENT_KEY_FILE, client_key.serialize_pem()),
    ])
}

/// The parameters of a certificate for this purpose.
fn certificate_params(
    purpose: ExtendedKeyUsagePurpose,
    names: &[&str],
) -> Result<CertificateParams, Error> {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, "ratelimit-testkit test");
    params.extended_key_usages = vec![purpose];
    Ok(params)
}
