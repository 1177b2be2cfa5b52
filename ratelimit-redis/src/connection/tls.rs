//! [`Tls`]: the trusted authorities and the client's certificate, built once and shared by both
//! clients.
//!
//! The configuration names its cryptography provider itself. Clients left alone use the process's
//! default, and panic if there is none or if the features of two crates make it ambiguous.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{CertificateError, ClientConfig, Error, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::error::{RedisError, Result};
use crate::url::TlsFiles;

/// A TLS configuration.
#[derive(Clone)]
pub(crate) struct Tls {
    config: Arc<ClientConfig>,
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`RedisError::Config`] if a file cannot be read or does not contain what it should.
    pub(crate) fn new(files: &TlsFiles) -> Result<Self> {
        let provider = CryptoProvider::get_default()
            .cloned()
            .unwrap_or_else(|| Arc::new(rustls::crypto::ring::default_provider()));
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| refused(&format!("no encryption to be had: {error}")))?
            .with_root_certificates(roots(files.ca.as_deref())?);
        let config = match (&files.certificate, &files.key) {
            (Some(certificate), Some(key)) => {
                let ours = config.with_client_auth_cert(certificates(certificate)?, secret(key)?);
                ours.map_err(|error| {
                    let (certificate, key) = (certificate.display(), key.display());
                    refused(&format!("tls-cert={certificate} and tls-key={key}: {error}"))
                })?
            }
            // Options with one of the two are refused.
            _ => config.with_no_client_auth(),
        };
        Ok(Self { config: Arc::new(config) })
    }

    /// For a client that opens its own streams.
    pub(crate) fn connector(&self) -> TlsConnector {
        Arc::clone(&self.config).into()
    }

    /// Performs the handshake with the server of this name.
    pub(crate) async fn connect(
        &self,
        host: &str,
        stream: TcpStream,
    ) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        self.connector().connect(name, stream).await
    }
}

/// The error for a connection that failed because one side rejects the other's certificate, or does
/// not speak TLS.
pub(super) fn refused_by(address: &str, error: &io::Error) -> Option<RedisError> {
    let error = error.get_ref()?.downcast_ref::<Error>()?;
    Some(RedisError::Config(match error {
        Error::InvalidCertificate(why) => format!(
            "the certificate of Redis at {address} cannot be verified ({error}){}",
            remedy(why)
        ),
        Error::AlertReceived(_) => format!(
            "Redis at {address} refuses an encrypted connection ({error}); if it wants a \
             certificate, name one that it trusts by ?tls-cert=FILE&tls-key=FILE in the URL"
        ),
        Error::InvalidMessage(_) => format!(
            "what answers at {address} does not speak TLS; use redis:// for connections that are \
             not encrypted"
        ),
        _ => return None,
    }))
}

/// What to do about a certificate.
const fn remedy(why: &CertificateError) -> &'static str {
    use CertificateError as Why;
    match why {
        Why::Expired | Why::ExpiredContext { .. } => {
            "; it has expired: give the server a new one, and check the clocks of both sides"
        }
        Why::NotValidYet | Why::NotValidYetContext { .. } => {
            "; it is not valid yet: check the clocks of both sides"
        }
        Why::NotValidForName | Why::NotValidForNameContext { .. } => {
            "; name the server as it is named in the certificate, or issue one for the name in the \
             URL, and for what a cluster's nodes or sentinels announce"
        }
        Why::UnknownIssuer | Why::BadSignature => {
            "; name the authority that signed it by ?tls-ca=FILE in the URL"
        }
        _ => "",
    }
}

fn refused(what: &str) -> RedisError {
    RedisError::Config(what.to_owned())
}

fn roots(file: Option<&Path>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let Some(file) = file else {
        let found = rustls_native_certs::load_native_certs();
        let (added, _) = roots.add_parsable_certificates(found.certs);
        if added > 0 {
            return Ok(roots);
        }
        let why = found.errors.first().map(|error| format!(" ({error})")).unwrap_or_default();
        return Err(refused(&format!(
            "the system has no certificates of authorities{why}; install its package, such as \
             ca-certificates, or name a file by tls-ca"
        )));
    };
    for certificate in certificates(file)? {
        let added = roots.add(certificate);
        added.map_err(|error| refused(&format!("tls-ca={}: {error}", file.display())))?;
    }
    Ok(roots)
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    let read: Vec<_> = read.map_err(|error| unreadable(file, &error))?;
    if read.is_empty() { Err(unreadable(file, &PemError::NoItemsFound)) } else { Ok(read) }
}

fn secret(file: &Path) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_file(file).map_err(|error| unreadable(file, &error))
}

fn unreadable(file: &Path, error: &PemError) -> RedisError {
    let file = file.display();
    refused(&match error {
        PemError::Io(error) => {
            format!("cannot read {file} of tls-ca, tls-cert or tls-key in the URL: {error}")
        }
        PemError::NoItemsFound => format!(
            "{file} holds none of what it is to hold; it has to be PEM, with BEGIN CERTIFICATE for \
             tls-ca and tls-cert and BEGIN PRIVATE KEY for tls-key"
        ),
        error => format!("{file} is no PEM: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remedy_is_for_what_is_wrong_with_the_certificate() {
        for (why, says, says_not) in [
            (CertificateError::UnknownIssuer, "tls-ca", "expired"),
            (CertificateError::Expired, "expired", "tls-ca"),
            (CertificateError::NotValidYet, "clocks", "tls-ca"),
            (CertificateError::NotValidForName, "announce", "tls-ca"),
            (CertificateError::Revoked, "verified", ";"),
        ] {
            let met = io::Error::other(Error::InvalidCertificate(why.clone()));
            let error = refused_by("h:1", &met).expect("refused").to_string();
            assert!(error.contains(says) && !error.contains(says_not), "{why:?}: {error}");
        }
    }
}
