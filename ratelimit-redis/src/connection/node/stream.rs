//! [`open`]: the stream of a connection.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;

use crate::connection::endpoint::Endpoint;

/// A connection ends when the other side does not acknowledge bytes for this time.
#[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
pub(super) const USER_TIMEOUT: Duration = Duration::from_secs(20);

/// Ends an idle connection after about the same time if the other side has disappeared.
pub(super) fn keepalive() -> TcpKeepalive {
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(10));
    #[cfg(any(target_os = "android", target_os = "linux", target_vendor = "apple"))]
    let keepalive = keepalive.with_interval(Duration::from_secs(3)).with_retries(3);
    keepalive
}

pub(super) type Stream = Box<dyn ReadWrite>;

pub(super) trait ReadWrite: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ReadWrite for S {}

/// Opens a stream to one of the server's addresses, encrypted if its settings say so; without an
/// address, to its Unix socket.
pub(super) async fn open(endpoint: &Endpoint, address: Option<SocketAddr>) -> io::Result<Stream> {
    let Some(address) = address else {
        #[cfg(unix)]
        return Ok(Box::new(UnixStream::connect(&endpoint.host).await?));
        #[cfg(not(unix))]
        return Err(io::ErrorKind::Unsupported.into());
    };
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(&stream);
    socket.set_tcp_keepalive(&keepalive())?;
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
    match &endpoint.settings.tls {
        None => Ok(Box::new(stream)),
        #[cfg(feature = "tls")]
        Some(tls) => Ok(Box::new(tls.connect(&endpoint.host, stream).await?)),
        #[cfg(not(feature = "tls"))]
        Some(tls) => match *tls {},
    }
}
