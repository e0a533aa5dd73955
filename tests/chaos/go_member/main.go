// A member in Go of a fleet that it shares with Python members: it takes what it is given, claims what has expired, and
// tells on standard output, one JSON object a line, what it hears. For tests/chaos/test_mixed_fleet.py.
//
// Usage: POD_NAME=name go_member HOST:PORT SERVICE
package main

import (
	"context"
	"encoding/json"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/handcoding-labs/redis-stream-client-go/impl"
	"github.com/handcoding-labs/redis-stream-client-go/notifs"
	"github.com/redis/go-redis/v9"
)

type heard struct {
	What   string `json:"what"`
	Stream string `json:"stream"`
	Error  string `json:"error,omitempty"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	out := json.NewEncoder(os.Stdout)
	tell := func(what, stream string, err error) {
		line := heard{What: what, Stream: stream}
		if err != nil {
			line.Error = err.Error()
		}
		if err := out.Encode(line); err != nil {
			log.Fatal(err)
		}
	}

	server := redis.NewUniversalClient(&redis.UniversalOptions{Addrs: []string{os.Args[1]}})
	defer server.Close()
	member, err := impl.NewRedisStreamClient(server, os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	notifications, err := member.Init(ctx)
	if err != nil {
		log.Fatal(err)
	}
	tell("ready", member.ID(), nil)

	for {
		select {
		case <-ctx.Done():
			return
		case one, open := <-notifications:
			if !open {
				return
			}
			stream := one.Payload.DataStreamName
			switch one.Type {
			case notifs.StreamAdded:
				tell("added", stream, nil)
			case notifs.StreamDisowned:
				tell("disowned", stream, nil)
			case notifs.StreamExpired:
				tell("claimed", stream, member.Claim(ctx, one.Payload))
			}
		}
	}
}
