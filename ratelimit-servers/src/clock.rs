//! [`ServerClock`]: the clock of one server, which a test moves. A small library that is loaded
//! into the server adds an offset to what the system says. (The library `libfaketime` makes
//! `redis-server` hang: it allocates before the server's allocator is ready.)

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;

use crate::keeper::Recipe;
use crate::port::Port;
use crate::{RedisServer, on_free_ports};

/// A server asks this function for the time of day. It asks the kernel itself, so it needs neither
/// memory nor the function that it replaces.
const LIBRARY: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *ahead_s;

__attribute__((constructor)) static void start(void) {
  const char *name = getenv("SERVER_CLOCK");
  int file = name ? open(name, O_RDONLY) : -1;
  if (file < 0) return;
  void *page = mmap(0, sizeof *ahead_s, PROT_READ, MAP_SHARED, file, 0);
  if (page != MAP_FAILED) ahead_s = page;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  (void)zone;
  syscall(SYS_clock_gettime, CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec + (ahead_s ? *ahead_s : 0);
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}
"#;

/// In the directory "$0", compiles the library and becomes the server.
const START: &str = r#"cd "$0" && { [ -e clock ] || head -c 8 /dev/zero >clock; } && cc -shared -fPIC -O1 -o clock.so clock.c || exit 1
SERVER_CLOCK=clock LD_PRELOAD=./clock.so exec "$@""#;

/// Moves the clock of a server that was [started with one](RedisServer::start_with_clock).
#[derive(Debug)]
pub struct ServerClock {
    file: PathBuf,
}

impl RedisServer {
    /// Starts a server whose clock the test moves. It needs `cc`, which Rust links with.
    ///
    /// # Errors
    /// The server did not start, or there is no `cc`; the text gives the reason.
    pub fn start_with_clock() -> Result<(Self, ServerClock), String> {
        let server = on_free_ports(|| {
            let port = Port::claim()?;
            let mut recipe = Recipe::of_a_server(port.number(), &Self::binaries()[0], &[]);
            let server = std::mem::replace(&mut recipe.binary, "sh".to_owned());
            let directory = recipe.directory.to_string_lossy().into_owned();
            recipe.words.splice(0..0, ["-c".to_owned(), START.to_owned(), directory, server]);
            recipe.files = vec![("clock.c", LIBRARY.to_owned())];
            Self::start_recipe(recipe, &[], port, None)
        })?;
        let clock = ServerClock { file: server.recipe.directory.join("clock") };
        Ok((server, clock))
    }
}

impl ServerClock {
    /// Sets by how many seconds the server's clock is ahead of the system's.
    ///
    /// # Errors
    /// The server's directory is gone.
    pub fn set_ahead(&self, seconds: i64) -> Result<(), String> {
        let file = OpenOptions::new().write(true).open(&self.file);
        let written = file.and_then(|mut file| file.write_all(&seconds.to_ne_bytes()));
        written.map_err(|error| format!("{}: {error}", self.file.display()))
    }
}
