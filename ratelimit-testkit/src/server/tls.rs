//! [`TlsServer`]: a server that speaks TLS only.

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, Error, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};

use super::keeper::Recipe;
use super::port::Port;
use super::{Door, RedisServer, on_free_ports};

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
    client: String,
    client_key: String,
}

const CA_FILE: &str = "ca.crt";
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
    let Certificates { ca, server, server_key, client, client_key } = certificates.clone();
    recipe.files = vec![
        (CA_FILE, ca),
        ("server.crt", server),
        ("server.key", server_key),
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
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let (server, server_key) =
            signed(names.to_vec(), ExtendedKeyUsagePurpose::ServerAuth, &issuer)?;
        let (client, client_key) =
            signed(Vec::new(), ExtendedKeyUsagePurpose::ClientAuth, &issuer)?;
        Ok(Self { ca, server, server_key, client, client_key })
    }
}

/// A certificate for these names, and its key.
fn signed(
    names: Vec<String>,
    purpose: ExtendedKeyUsagePurpose,
    issuer: &Issuer<'_, KeyPair>,
) -> Result<(String, String), Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, "ratelimit-testkit test");
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![purpose];
    let key = KeyPair::generate()?;
    Ok((params.signed_by(&key, issuer)?.pem(), key.serialize_pem()))
}
