import static io.confluent.parallelconsumer.ParallelConsumerOptions.ProcessingOrder.UNORDERED;

import io.confluent.parallelconsumer.ParallelConsumerOptions;
import io.confluent.parallelconsumer.ParallelStreamProcessor;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.stream.Collectors;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * A member of a group that runs Confluent's Parallel Consumer until it is killed: BOOTSTRAP GROUP TOPIC OFFSET,OFFSET…
 * It prints each offset that it has finished, on a line; those that are named it never finishes.
 */
public final class Member {
    public static void main(String[] arguments) {
        Set<Long> stuck = Arrays.stream(arguments[3].split(",")).map(Long::valueOf).collect(Collectors.toSet());
        CountDownLatch never = new CountDownLatch(1);
        Map<String, Object> settings = Map.of(
                "bootstrap.servers", arguments[0],
                "group.id", arguments[1],
                "auto.offset.reset", "earliest",
                "enable.auto.commit", false,
                "session.timeout.ms", 6_000,
                "heartbeat.interval.ms", 1_000);
        var consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        ParallelConsumerOptions<byte[], byte[]> options = ParallelConsumerOptions.<byte[], byte[]>builder()
                .consumer(consumer)
                .ordering(UNORDERED)
                .maxConcurrency(stuck.size() + 4)
                .commitInterval(Duration.ofMillis(200))
                .build();
        ParallelStreamProcessor<byte[], byte[]> member = ParallelStreamProcessor.createEosStreamProcessor(options);
        member.subscribe(List.of(arguments[2]));
        member.poll(context -> {
            long offset = context.offset();
            if (stuck.contains(offset)) {
                try {
                    never.await();
                } catch (InterruptedException interrupted) {
                    Thread.currentThread().interrupt();
                    throw new IllegalStateException(interrupted);
                }
            }
            System.out.println(offset);
        });
    }
}
