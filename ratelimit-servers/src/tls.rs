//! [`TlsServer`]: a server that speaks TLS only.

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, Error, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};

use crate::keeper::Recipe;
use crate::port::Port;
use crate::{Door, RedisServer, on_free_ports};

/// A server that speaks TLS only, with certificates that are generated for it and deleted with it.
///
/// In all other respects it is a [`RedisServer`]. Its URL begins with `rediss://`.
/// [`command`](RedisServer::command) uses a Unix socket, without TLS. The certificate is for `localhost` and
/// `127.0.0.1`.
#[derive(Debug)]
pub struct TlsServer {
    server: RedisServer,
    certificates: Certificates,
    /// The certificates of the authority and of the client, and the client's key.
    files: [PathBuf; 3],
}

/// All in PEM.
#[derive(Clone, Debug)]
struct Certificates {
    ca: String,
    server: String,
    server_key: String,
    /// For the same key, and long over.
    expired: String,
    client: String,
    client_key: String,
}

const CA_FILE: &str = "ca.crt";
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

    /// Starts a server that speaks TLS only with additional arguments, such as `["--tls-auth-clients", "yes"]`,
    /// which demands a certificate of every client.
    ///
    /// # Errors
    /// The server did not start; the text gives the reason and the remedy. The binary may have been built
    /// without TLS.
    pub fn start_tls_with(binary: &str, args: &[&str]) -> Result<TlsServer, String> {
        let made = Certificates::make();
        let certificates = made.map_err(|error| format!("no certificates: {error}"))?;
        let server = on_free_ports(|| start_tls_on(Port::claim()?, binary, args, &certificates))?;
        let directory = &server.recipe.directory;
        let files = [CA_FILE, CLIENT_FILE, CLIENT_KEY_FILE].map(|name| directory.join(name));
        Ok(TlsServer { server, certificates, files })
    }
}

impl TlsServer {
    /// Gives the server a certificate that has expired. Open connections stay; each new one meets it.
    ///
    /// # Errors
    /// The server does not answer or refuses.
    pub fn expire(&self) -> Result<(), String> {
        self.command(&["CONFIG", "SET", "tls-cert-file", EXPIRED_FILE])?.ok().map(drop)
    }

    /// The certificate of the authority that signed the server's: clients must trust it.
    #[must_use]
    pub fn ca_pem(&self) -> &str {
        &self.certificates.ca
    }

    /// [`ca_pem`](Self::ca_pem) as a file, which lasts as long as the server.
    #[must_use]
    pub fn ca_path(&self) -> &Path {
        &self.files[0]
    }

    /// A client's certificate, signed by the same authority.
    #[must_use]
    pub fn client_cert_pem(&self) -> &str {
        &self.certificates.client
    }

    /// The private key of [`client_cert_pem`](Self::client_cert_pem).
    #[must_use]
    pub fn client_key_pem(&self) -> &str {
        &self.certificates.client_key
    }

    /// [`client_cert_pem`](Self::client_cert_pem) as a file, which lasts as long as the server.
    #[must_use]
    pub fn client_cert_path(&self) -> &Path {
        &self.files[1]
    }

    /// [`client_key_pem`](Self::client_key_pem) as a file, which lasts as long as the server.
    #[must_use]
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

impl DerefMut for TlsServer {
    fn deref_mut(&mut self) -> &mut RedisServer {
        &mut self.server
    }
}

fn start_tls_on(
    port: Port,
    binary: &str,
    args: &[&str],
    certificates: &Certificates,
) -> Result<RedisServer, String> {
    let number = port.number().to_string();
    let mut tls_args = vec!["--port", "0", "--tls-port", &number, "--tls-auth-clients", "no"];
    tls_args.extend(["--tls-ca-cert-file", CA_FILE]);
    // Relative to the server's own directory.
    tls_args.extend(["--tls-cert-file", "server.crt", "--tls-key-file", "server.key"]);
    tls_args.extend(["--unixsocket", "side-door"]);
    tls_args.extend(args);
    let mut recipe = Recipe::of_a_server(port.number(), binary, &tls_args);
    let Certificates { ca, server, server_key, expired, client, client_key } = certificates.clone();
    recipe.files = vec![
        (CA_FILE, ca),
        ("server.crt", server),
        ("server.key", server_key),
        (EXPIRED_FILE, expired),
        (CLIENT_FILE, client),
        (CLIENT_KEY_FILE, client_key),
    ];
    let side_door = recipe.directory.join("side-door");
    RedisServer::start_recipe(recipe, args, port, Door::Tls(side_door))
}

impl Certificates {
    fn make() -> Result<Self, Error> {
        let mut authority = CertificateParams::new(Vec::new())?;
        authority.distinguished_name.push(DnType::CommonName, "ratelimit-testkit");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate()?;
        let ca = authority.self_signed(&key)?.pem();
        let issuer = Issuer::new(authority, key);
        let server = of(ExtendedKeyUsagePurpose::ServerAuth, &["localhost", "127.0.0.1"])?;
        let client = of(ExtendedKeyUsagePurpose::ClientAuth, &[])?;
        let (server_key, client_key) = (KeyPair::generate()?, KeyPair::generate()?);
        let mut expired = server.clone();
        expired.not_before = date_time_ymd(2000, 1, 1);
        expired.not_after = date_time_ymd(2001, 1, 1);
        Ok(Self {
            ca,
            server: server.signed_by(&server_key, &issuer)?.pem(),
            expired: expired.signed_by(&server_key, &issuer)?.pem(),
            server_key: server_key.serialize_pem(),
            client: client.signed_by(&client_key, &issuer)?.pem(),
            client_key: client_key.serialize_pem(),
        })
    }
}

/// The parameters of a certificate for this purpose.
fn of(purpose: ExtendedKeyUsagePurpose, names: &[&str]) -> Result<CertificateParams, Error> {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, "ratelimit-testkit test");
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![purpose];
    Ok(params)
}
