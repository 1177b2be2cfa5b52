//! A proxy in front of a server, which the benchmarks give something to do with what passes.

use std::io::{self, Read};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;

/// Takes one direction of a connection from this stream to that one, until either ends.
pub(super) type Pump = Box<dyn FnOnce(TcpStream, TcpStream) + Send>;

/// Listens on a free port, and connects each client to the server by pumps of its own: of its
/// requests, and of the replies. Returns the port.
pub(super) fn relay(
    server_port: u16,
    pumps: impl Fn() -> [Pump; 2] + Send + 'static,
) -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    // The threads end with the program; an error ends a connection, which the client notices.
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            drop(connect(client, server_port, pumps()));
        }
    });
    Ok(port)
}

fn connect(client: TcpStream, server_port: u16, [requests, replies]: [Pump; 2]) -> io::Result<()> {
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, server_port))?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, from_server) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || requests(from_client, server));
    thread::spawn(move || replies(from_server, client));
    Ok(())
}

/// Hands on what is read until the stream ends, or nothing more is wanted.
pub(super) fn each_chunk(mut from: TcpStream, mut wants_more: impl FnMut(&[u8]) -> bool) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if !wants_more(&buffer[..length]) {
            break;
        }
    }
}
